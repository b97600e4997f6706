# `pct start`, `stop`, `shutdown`, `reboot`, `suspend`, `resume`, `unlock`.
# Deviation: the real `suspend` checkpoints to disk (CRIU, "experimental"); here it freezes.
use strict;
use warnings;
our %lab;

sub check_lock {
    my ($conf) = @_;
    fail( 255, "CT is locked ($conf->{lock})\n" ) if $conf->{lock};
}

sub power_start {
    my ( undef, $vmid ) = arguments( 'start', 1, { skiplock => 1, debug => 1 } );
    my ( $conf, $raw ) = load_config($vmid);
    check_lock($conf);
    fail( 255, "cluster not ready - no quorum?\n" )  if defined fault('no-quorum');
    fail( 255, "CT $vmid already running\n" ) if is_running($vmid);
    boot( $vmid, $conf, $raw );
}

sub boot {
    my ( $vmid, $conf, $raw ) = @_;
    for my $key ( sort grep { /^dev\d+$/ } keys %$conf ) {
        my ($device) = split /,/, $conf->{$key};
        $device =~ s/^path=//;
        fail( 255, "Device $device does not exist\n" ) if !-e $device;
    }
    my $started;
    if ( $lab{backend} eq 'lxc' ) { $started = boot_lxc( $vmid, $raw ) }
    else {
        require '/usr/lib/dflashctl-lab/namespaces.pl';
        $started = namespaces_boot( $vmid, $raw );
    }
    fail( 255, "startup for container '$vmid' failed\n" ) if !$started;
}

sub boot_lxc {
    my ( $vmid, $raw ) = @_;
    my $folder = "$lab{root}/lxc/$vmid";
    open( my $fh, '>', "$folder/config" ) or fail( 255, "$folder/config: $!\n" );
    print $fh slurp("$folder/base"), map { "$_->[0] = $_->[1]\n" } @$raw;
    close $fh or fail( 255, "$folder/config: $!\n" );
    unlink "$folder/log";
    open( my $null, '<', '/dev/null' );
    open( STDIN, '<&', $null );
    my $ok = quiet( lxc( 'lxc-start', $vmid, '-l', 'ERROR', '-o', "$folder/log" ) );
    return 1 if $ok;
    print slurp("$folder/log") // '';    # the detail goes to stdout, as with the real one
    for ( 1 .. 200 ) {                   # its monitor ends a moment later
        last if !is_running($vmid);
        select undef, undef, undef, 0.01;
    }
    return 0;
}

sub quiet { return system("@_ >/dev/null 2>&1") == 0 }    # whether it went well

sub running_or_fail {
    my ( $verb, %known ) = @_;
    my ( $option, $vmid ) = arguments( $verb, 1, \%known );
    my ( $conf, $raw ) = load_config($vmid);
    check_lock($conf);
    fail( 255, "CT $vmid not running\n" ) if !is_running($vmid);
    return ( $option, $vmid, $conf, $raw );
}

sub power_stop {
    my ( undef, $vmid ) = running_or_fail( 'stop', skiplock => 1 );
    halt( $vmid, 0 ) or fail( 255, "stopping CT $vmid failed\n" );
}

sub power_shutdown {
    my ( $option, $vmid ) = running_or_fail( 'shutdown', timeout => 1, forcestop => 1 );
    my $seconds = $option->{timeout} // 60;
    return if halt( $vmid, $seconds );
    fail( 255, "command 'lxc-stop -n $vmid --nokill --timeout $seconds' failed: exit code 1\n" )
      if !$option->{forcestop};
    halt( $vmid, 0 );
}

sub power_reboot {
    my ( $option, $vmid, $conf, $raw ) = running_or_fail( 'reboot', timeout => 1 );
    my $seconds = $option->{timeout} // 60;
    halt( $vmid, $seconds ) or fail( 255, "CT $vmid did not stop within $seconds s\n" );
    boot( $vmid, $conf, $raw );
}

# Returns whether the container has ended; 0 seconds means at once, by SIGKILL.
sub halt {
    my ( $vmid, $seconds ) = @_;
    if ( $lab{backend} ne 'lxc' ) {
        require '/usr/lib/dflashctl-lab/namespaces.pl';
        return namespaces_halt( $vmid, $seconds );
    }
    freeze( $vmid, 0 ) if !$seconds;    # on cgroup version 1 lxc-stop waits for ever for the frozen
    my @how = $seconds ? ( '--nokill', '--timeout', $seconds ) : ('--kill');
    return quiet( lxc( 'lxc-stop', $vmid, @how ) );
}

sub power_suspend {
    my ( undef, $vmid ) = running_or_fail('suspend');
    freeze( $vmid, 1 ) or fail( 255, "suspending CT $vmid failed\n" );
}

sub power_resume {
    my ( undef, $vmid ) = running_or_fail('resume');
    freeze( $vmid, 0 ) or fail( 255, "resuming CT $vmid failed\n" );
}

sub freeze {
    my ( $vmid, $on ) = @_;
    if ( $lab{backend} ne 'lxc' ) {
        require '/usr/lib/dflashctl-lab/namespaces.pl';
        return namespaces_freeze( $vmid, $on );
    }
    return quiet( lxc( $on ? 'lxc-freeze' : 'lxc-unfreeze', $vmid ) );
}

sub power_unlock {
    my ( undef, $vmid ) = arguments( 'unlock', 1, {} );
    load_config($vmid);
    my $path = "/etc/pve/lxc/$vmid.conf";
    my $text = slurp($path);
    $text =~ s/^lock:.*\n//mg;
    open( my $fh, '>', $path ) or fail( 255, "$path: $!\n" );
    print $fh $text;
    close $fh or fail( 255, "$path: $!\n" );
}

1;
