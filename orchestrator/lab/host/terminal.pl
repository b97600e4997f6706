# A terminal for `pct exec` under the unshare backend: one of the container's own, so that tmux and
# tty(1) work inside, relayed to the caller's as lxc-attach does.
use strict;
use warnings;

my ( $TIOCGPTN, $TIOCSPTLCK, $TIOCGWINSZ, $TIOCSWINSZ, $TIOCSCTTY ) =
  ( 0x80045430, 0x40045431, 0x5413, 0x5414, 0x540e );

sub caller_tty { return -t STDIN ? \*STDIN : -t STDOUT ? \*STDOUT : \*STDERR }

sub terminal_open {    # (master, the slave's path inside the container)
    my ($pid) = @_;
    open( my $master, '+<', "/proc/$pid/root/dev/pts/ptmx" ) or fail( 255, "lxc-attach: ptmx: $!\n" );
    my ( $unlock, $index ) = ( pack( 'i', 0 ), pack( 'i', 0 ) );
    ioctl( $master, $TIOCSPTLCK, $unlock ) or fail( 255, "lxc-attach: ptmx: $!\n" );
    ioctl( $master, $TIOCGPTN,   $index )  or fail( 255, "lxc-attach: ptmx: $!\n" );
    return ( $master, '/dev/pts/' . unpack( 'i', $index ) );
}

sub terminal_take {    # in the child: the slave becomes its controlling terminal and fds 0 to 2
    my ($path) = @_;
    syscall( qx(uname -m) =~ /x86_64/ ? 112 : 157 );    # setsid
    open( my $slave, '+<', $path ) or fail( 255, "lxc-attach: $path: $!\n" );
    ioctl( $slave, $TIOCSCTTY, 0 );
    open( STDIN,  '<&', $slave );
    open( STDOUT, '>&', $slave );
    open( STDERR, '>&', $slave );
}

sub terminal_relay {    # until the child closes its side
    my ( $master, $child ) = @_;
    my $tty  = caller_tty();
    my $size = pack 'S4', 0, 0, 0, 0;
    my $copy_size = sub {
        ioctl( $tty, $TIOCGWINSZ, $size ) and ioctl( $master, $TIOCSWINSZ, $size );
    };
    $copy_size->();
    local $SIG{WINCH} = $copy_size;
    my $saved = -t STDIN ? qx(stty -g 2>/dev/null) : '';
    system 'stty', 'raw', '-echo' if $saved;
    my $ends = '';
    vec( $ends, fileno $master, 1 ) = 1;
    vec( $ends, fileno STDIN,   1 ) = 1;
    while (1) {
        my $ready = $ends;
        next if select( $ready, undef, undef, undef ) < 0;    # a signal
        if ( vec( $ready, fileno $master, 1 ) ) {
            last if !sysread( $master, my $bytes, 65536 );    # EIO: the last user has gone
            write_all( \*STDOUT, $bytes );
        }
        if ( vec( $ready, fileno STDIN, 1 ) ) {
            if   ( sysread( STDIN, my $bytes, 65536 ) ) { write_all( $master, $bytes ) }
            else                                        { vec( $ends, fileno STDIN, 1 ) = 0 }
        }
    }
    chomp $saved;
    system 'stty', $saved if $saved;
}

sub write_all {
    my ( $fh, $bytes ) = @_;
    while ( length $bytes ) {
        my $count = syswrite $fh, $bytes;
        return if !defined $count && !$!{EINTR};
        substr( $bytes, 0, $count // 0, '' );
    }
}

1;
