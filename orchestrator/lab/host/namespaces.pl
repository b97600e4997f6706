# The unshare backend: what LXC does for `pct`, by system calls. Perl's `syscall` needs no modules;
# the numbers are those of the kernel's x86_64 and generic (aarch64) tables.
use strict;
use warnings;
no warnings 'exec';    # the line after exec is reached when it fails
our ( %lab, @groups );

my %number = qx(uname -m) =~ /x86_64/
  ? ( setns => 308, unshare => 272, prctl => 157 )
  : ( setns => 268, unshare => 97, prctl => 167 );
my %clone = (    # <linux/sched.h>
    mnt => 0x20000, cgroup => 0x2000000, uts => 0x4000000, ipc => 0x8000000,
    pid => 0x20000000, net => 0x40000000,
);

sub write_file {
    my ( $path, $text ) = @_;
    open( my $fh, '>', $path ) or return 0;
    print $fh $text;
    return close $fh;
}

# --- start -----------------------------------------------------------------------------------------

sub namespaces_boot {
    my ( $vmid, $raw ) = @_;
    my $folder = "$lab{root}/ct/$vmid";
    my $spec = slurp("$folder/boot") // fail( 255, "$folder/boot: $!\n" );
    $spec .= join '', map { $_->[0] eq 'lxc.mount.entry' ? "mount $_->[1]\n" : () } @$raw;
    write_file( "$folder/spec", $spec ) or fail( 255, "$folder/spec: $!\n" );
    write_file( "$folder/boot_id", slurp('/proc/sys/kernel/random/uuid') );
    my ($memory) = $spec =~ /^memory (\d+)/m;
    make_groups( $vmid, $memory );

    pipe( my $pid_in, my $pid_out );
    pipe( my $go_in,  my $go_out );
    pipe( my $log_in, my $log_out );
    my $middle = fork() // fail( 255, "fork: $!\n" );
    if ( !$middle ) {
        close $_ for $pid_in, $go_out, $log_in;
        become_container( $vmid, $folder, $pid_out, $go_in, $log_out );
    }
    close $_ for $pid_out, $go_in, $log_out;
    my $pid = <$pid_in>;
    waitpid( $middle, 0 );
    my $error = defined $pid ? add_network( $vmid, $spec, $pid + 0 ) : '';
    syswrite( $go_out, "go\n" ) if defined $pid && $error eq '';
    close $go_out;
    local $/;
    $error .= <$log_in> // '';
    if ( defined $pid && $error eq '' ) {
        return write_file( "$folder/init", $pid + 0 . ' ' . start_time( $pid + 0 ) . "\n" );
    }
    print $error;    # the detail goes to stdout, as with LXC
    return 0;
}

sub make_groups {
    my ( $vmid, $memory ) = @_;
    for my $group (@groups) {
        mkdir "$group/lxc";
        mkdir "$group/lxc/$vmid";
        if ($memory) {
            write_file( "$group/lxc/$vmid/$_", $memory ) || 1
              for grep { -e "$group/lxc/$vmid/$_" } qw(memory.limit_in_bytes memory.max);
        }
        mkdir "$group/lxc/$vmid/ns";
    }
}

sub join_groups {
    my ($vmid) = @_;
    write_file( "$_/lxc/$vmid/ns/cgroup.procs", "0\n" ) || return 0 for @groups;
    return 1;
}

sub become_container {
    my ( $vmid, $folder, $pid_out, $go_in, $log_out ) = @_;
    open( STDIN,  '<',  '/dev/null' );
    open( STDOUT, '>',  '/dev/null' );
    open( STDERR, '>&', $log_out );
    my $flags = 0;
    $flags |= $_ for values %clone;
    if ( !join_groups($vmid) || syscall( $number{unshare}, $flags ) < 0 ) {
        print STDERR "cannot make namespaces: $!\n";
        exit 1;
    }
    my $init = fork();
    if ($init) {
        syswrite( $pid_out, "$init\n" );
        exit 0;
    }
    close $pid_out;
    exit 1 if !defined readline $go_in;
    $ENV{PATH} = '/usr/sbin:/usr/bin:/sbin:/bin';
    exec '/bin/setsid', '/bin/sh', '/usr/lib/dflashctl-lab/ct-start', "$folder/spec", "$folder/boot_id";
    exit 1;
}

sub add_network {    # '' or what went wrong
    my ( $vmid, $spec, $pid ) = @_;
    my ($bridge) = $spec =~ /^bridge (\S+)/m or return '';
    my $veth = 'd' . substr( $bridge, 3, 6 ) . sprintf '%x', $vmid;
    # The kernel takes down the last boot's in its own time, and one machine's all in one queue.
    my $command = "ip link del $veth 2>/dev/null;"
      . " ip link add $veth type veth peer name eth0 netns $pid"
      . " && ip link set $veth master $bridge up";
    return qx{($command) 2>&1};
}

# --- exec ------------------------------------------------------------------------------------------

sub namespaces_attach {
    my ( $vmid, $keep, @argv ) = @_;
    my $pid = init_pid($vmid) // fail( 255, "container '$vmid' not running!\n" );
    my ( $master, $slave );
    if ( -t STDIN || -t STDOUT || -t STDERR ) {
        require '/usr/lib/dflashctl-lab/terminal.pl';
        ( $master, $slave ) = terminal_open($pid);
    }
    my $cwd = readlink '/proc/self/cwd';
    my %space = map { $_ => open_namespace( $pid, $_ ) } keys %clone;
    syscall( $number{setns}, fileno $space{pid}, 0 );    # holds for children only
    my $child = fork() // fail( 255, "lxc-attach: $!\n" );
    if ( !$child ) {
        syscall( $number{prctl}, 1, 9, 0, 0, 0 );    # die with the parent, as under lxc-attach
        join_groups($vmid);                          # blocks here while the container is frozen
        syscall( $number{setns}, fileno $space{$_}, 0 ) for qw(cgroup uts ipc net mnt);
        chdir $cwd or chdir '/';
        terminal_take($slave) if $master;
        %ENV = ( PATH => '/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin', TERM => $ENV{TERM} )
          if !$keep;
        $ENV{container} = 'lxc';
        exec { $argv[0] } @argv;
        print STDERR "lxc-attach: $vmid: ../src/lxc/attach.c: lxc_attach_run_command: 1841 $! - "
          . "Failed to exec \"$argv[0]\"\n";
        exit( $!{EACCES} ? 126 : 127 );
    }
    terminal_relay( $master, $child ) if $master;
    waitpid( $child, 0 );
    return $? & 127 ? 128 + ( $? & 127 ) : $? >> 8;
}

sub open_namespace {
    my ( $pid, $name ) = @_;
    open( my $fh, '<', "/proc/$pid/ns/$name" ) or fail( 255, "lxc-attach: $name namespace: $!\n" );
    return $fh;
}

# --- stop and freeze ---------------------------------------------------------------------------------

sub namespaces_halt {    # whether it has ended; 0 seconds means SIGKILL
    my ( $vmid, $seconds ) = @_;
    my $pid = init_pid($vmid) // return 1;
    if ($seconds) { kill 'TERM', $pid }
    else {
        namespaces_freeze( $vmid, 0 );    # version 1 delivers no SIGKILL to the frozen
        kill 'KILL', $pid;
    }
    for ( 1 .. 200 * ( $seconds || 10 ) ) {
        last if !init_pid($vmid);
        select undef, undef, undef, 0.005;
    }
    return 0 if init_pid($vmid);
    unlink "$lab{root}/ct/$vmid/init";
    for my $group (@groups) { rmdir "$group/lxc/$vmid/ns"; rmdir "$group/lxc/$vmid" }
    return 1;
}

sub namespaces_freeze {
    my ( $vmid, $on ) = @_;
    for my $group (@groups) {
        my $path = "$group/lxc/$vmid/freezer.state";
        return write_file( $path, $on ? "FROZEN\n" : "THAWED\n" ) if -e $path;
    }
    return write_file( "$groups[0]/lxc/$vmid/cgroup.freeze", $on ? "1\n" : "0\n" );
}

1;
