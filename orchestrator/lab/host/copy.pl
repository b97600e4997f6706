# `pct push` and `pct pull`. A failed copy is a message on stderr and exit code 0, and the copying
# itself is unchecked: the real one runs it in a worker whose result nobody reads.
use strict;
use warnings;
our %lab;

my %SETNS = ( x86_64 => 308, aarch64 => 268 );
my $PM    = '/usr/share/perl5/PVE/CLI/pct.pm';

sub copy_push {
    my ( $option, $vmid, $file, $target ) = copy_arguments('push');
    load_config($vmid);
    with_flock(
        $vmid,
        sub {
            fail( 255, "can only push files to a running CT at $PM line 477.\n" ) if !is_running($vmid);
            worker( sub { push_file( $vmid, $file, $target, $option ) } );
        }
    );
}

sub copy_pull {
    my ( $option, $vmid, $path, $target ) = copy_arguments('pull');
    load_config($vmid);
    with_flock(
        $vmid,
        sub {
            fail( 255, "can only pull files from a running CT at $PM line 560.\n" ) if !is_running($vmid);
            worker( sub { pull_file( $vmid, $path, $target, $option ) } );
        }
    );
}

sub copy_arguments {
    my ($verb) = @_;
    my ( $option, @rest ) = arguments( $verb, 3, { user => 1, group => 1, perms => 1 } );
    if ( defined( my $perms = $option->{perms} ) ) {
        usage( $verb, "Parameter verification failed.\nperms: invalid format - '$perms'" )
          if $perms !~ /^(0x[0-9a-f]+|[0-7]+)$/i;
        $option->{perms} = $perms =~ /^0x/i ? hex $perms : oct $perms;
    }
    return ( $option, @rest );
}

sub with_flock {
    my ( $vmid, $code ) = @_;
    my $path = "/run/lock/lxc/pve-config-$vmid.lock";
    open( my $fh, '>>', $path ) or fail( 255, "can't open file '$path' - $!\n" );
    if ( !flock( $fh, 6 ) ) {    # exclusive, without waiting
        print STDERR "trying to acquire lock...\n";
        local $SIG{ALRM} = sub { fail( 4, "can't lock file '$path' - got timeout\n" ) };
        alarm 10;
        flock( $fh, 2 ) or fail( 4, "can't lock file '$path' - $!\n" );
        alarm 0;
    }
    $code->();
    close $fh;
}

sub worker {    # its failure changes nothing
    my ($code) = @_;
    my $pid = fork() // fail( 255, "fork: $!\n" );
    if ( !$pid ) {
        eval { $code->(); 1 } or print STDERR $@;
        exit 0;
    }
    waitpid $pid, 0;
}

sub enter_files {    # from here on, paths are the container's
    my ($vmid) = @_;
    my $pid = init_pid($vmid) // die "container '$vmid' not running!\n";
    open( my $fh, '<', "/proc/$pid/ns/mnt" ) or die "mount namespace: $!\n";
    my ($machine) = qx(uname -m) =~ /(\w+)/;
    syscall( $SETNS{$machine} // 268, fileno $fh, 0 ) == 0 or die "mount namespace: $!\n";
    chdir '/';
}

sub owner {    # (uid, gid) by the names of whichever side we are on; -1 leaves it
    my ($option) = @_;
    my ( $uid, $gid ) = ( -1, -1 );
    if ( defined( my $user = $option->{user} ) ) {
        $uid = $user =~ /^\d+$/ ? $user : account( '/etc/passwd', $user ) // die "failed to get uid for: $user\n";
    }
    if ( defined( my $group = $option->{group} ) ) {
        $gid = $group =~ /^\d+$/ ? $group : account( '/etc/group', $group ) // die "failed to get gid for: $group\n";
    }
    return ( $uid, $gid );
}

sub account {    # by the file, not by libc: that has the host's names in its cache
    my ( $path, $name ) = @_;
    return ( slurp($path) // '' ) =~ /^\Q$name\E:[^:]*:(\d+):/m ? $1 : undef;
}

sub copy_unchecked {
    my ( $from, $to ) = @_;
    while ( sysread( $from, my $bytes, 1 << 20 ) ) { syswrite( $to, $bytes ) }
}

sub push_file {
    my ( $vmid, $file, $target, $option ) = @_;
    open( my $from, '<', $file ) or die "failed to open $file for reading: $!\n";
    enter_files($vmid);
    my ( $uid, $gid ) = owner($option);
    open( my $to, '>', $target ) or die "failed to create file: $target: $!\n";
    chown $uid, $gid, $to if $uid != -1 || $gid != -1;
    chmod $option->{perms}, $to if defined $option->{perms};
    copy_unchecked( $from, $to );
}

sub pull_file {
    my ( $vmid, $path, $target, $option ) = @_;
    my ( $uid, $gid ) = owner($option);
    open( my $to, '>', $target ) or die "failed to create file: $target: $!\n";
    chown $uid, $gid, $to if $uid != -1 || $gid != -1;
    chmod $option->{perms}, $to if defined $option->{perms};
    enter_files($vmid);
    open( my $from, '<', $path ) or die "failed to open $path: $!\n";
    copy_unchecked( $from, $to );
}

1;
