# `pct exec` and `pct enter`. argv goes straight through: no shell ever sees it.
use strict;
use warnings;
no warnings 'exec';    # the line after exec is reached when it fails
our %lab;

sub attach_exec {
    my ( $option, $vmid, @argv ) = arguments( 'exec', 1, { 'keep-env' => 1 } );
    my $keep = boolean( 'exec', 'keep-env', $option->{'keep-env'} // 1 );
    load_config($vmid);
    fail( 255, "missing command at /usr/share/perl5/PVE/CLI/pct.pm line 246.\n" ) if !@argv;
    attach( $vmid, $keep, @argv );
}

sub attach_enter {
    my ( $option, $vmid ) = arguments( 'enter', 1, { 'keep-env' => 1 } );
    my $keep = boolean( 'enter', 'keep-env', $option->{'keep-env'} // 1 );
    load_config($vmid);
    attach( $vmid, $keep, '/bin/bash' );
}

sub attach {
    my ( $vmid, $keep, @argv ) = @_;
    fail( 255, "container '$vmid' not running!\n" ) if !is_running($vmid);
    $ENV{TERM} //= 'linux';
    if ( $lab{backend} ne 'lxc' ) {
        require '/usr/lib/dflashctl-lab/namespaces.pl';
        exit namespaces_attach( $vmid, $keep, @argv );
    }
    my @env = $keep ? ('--keep-env') : ( '--clear-env', '--keep-var', 'TERM' );
    exec lxc( 'lxc-attach', $vmid, @env, '--', @argv );
    fail( 255, "lxc-attach: $!\n" );
}

1;
