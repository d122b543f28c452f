package rpc

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"syscall"
)

// Network is the interface through which servers listen and clients connect. TCP is the real one; tests have
// an in-memory implementation.
type Network interface {
	// Listen takes host:port; an empty or unspecified host means every interface, port 0 a free port.
	Listen(address string) (net.Listener, error)
	// Dial connects to host:port.
	Dial(ctx context.Context, address string) (net.Conn, error)
}

// TCP is the operating system's network.
var TCP Network = tcp{}

type tcp struct{}

func (tcp) Listen(address string) (net.Listener, error) {
	lis, err := net.Listen("tcp", address)
	if host, port, splitErr := net.SplitHostPort(address); err != nil && splitErr == nil && host == "::" &&
		noIPv6(err) {
		lis, err = net.Listen("tcp", net.JoinHostPort("0.0.0.0", port))
	}
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("bind is %q: the port is in use by another process; choose another one, or "+
			"0 for a free one: %w", address, err)
	case err != nil:
		return nil, fmt.Errorf("bind is %q, which cannot be listened on: %w", address, err)
	}
	return tcpListener{lis.(*net.TCPListener)}, nil
}

// noIPv6 reports whether err says that this machine has no IPv6, so that "[::]" has to mean "0.0.0.0".
func noIPv6(err error) bool {
	return errors.Is(err, syscall.EAFNOSUPPORT) || errors.Is(err, syscall.EADDRNOTAVAIL)
}

func (tcp) Dial(ctx context.Context, address string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	return tcpConn{conn.(*net.TCPConn)}, nil
}

// PreferLoopback returns a network that connects to this host's own addresses through the loopback interface.
func PreferLoopback(network Network) Network {
	if _, isTCP := network.(tcp); isTCP {
		return loopbackFirst{network}
	}
	return network
}

type loopbackFirst struct{ Network }

func (l loopbackFirst) Dial(ctx context.Context, address string) (net.Conn, error) {
	if host, port, err := net.SplitHostPort(address); err == nil && IsThisHost(ctx, host) {
		if conn, err := l.Network.Dial(ctx, net.JoinHostPort("127.0.0.1", port)); err == nil {
			return conn, nil
		} // otherwise the server may listen on that address only
	}
	return l.Network.Dial(ctx, address)
}

// IsThisHost reports whether a name stands for addresses of this machine only.
func IsThisHost(ctx context.Context, host string) bool {
	found, err := net.DefaultResolver.LookupIPAddr(ctx, host)
	own, ownErr := net.InterfaceAddrs()
	if err != nil || ownErr != nil || len(found) == 0 {
		return false
	}
	return !slices.ContainsFunc(found, func(ip net.IPAddr) bool {
		return !slices.ContainsFunc(own, func(addr net.Addr) bool {
			prefix, ok := addr.(*net.IPNet)
			return ip.IP.IsLoopback() || ok && prefix.IP.Equal(ip.IP)
		})
	})
}

// tcpListener and tcpConn end a socket with shutdown(2) before they close it. A forked child (a data loader's
// worker) holds copies of the descriptors: without shutdown the port would stay in use, and peers would not
// notice the end, until that child ends.
type tcpListener struct{ *net.TCPListener }

func (l tcpListener) Accept() (net.Conn, error) {
	conn, err := l.AcceptTCP()
	if err != nil {
		return nil, err
	}
	return tcpConn{conn}, nil
}

func (l tcpListener) Close() error {
	if raw, err := l.SyscallConn(); err == nil {
		// Control fails if the listener is closed already; then there is nothing to do.
		_ = raw.Control(func(fd uintptr) { _ = syscall.Shutdown(int(fd), syscall.SHUT_RDWR) })
	}
	return l.TCPListener.Close()
}

type tcpConn struct{ *net.TCPConn }

func (c tcpConn) Close() error {
	// Either half may be closed already.
	_ = c.CloseRead()
	_ = c.CloseWrite()
	return c.TCPConn.Close()
}
