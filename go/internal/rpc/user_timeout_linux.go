package rpc

import (
	"net"
	"time"

	"golang.org/x/sys/unix"
)

func setUserTimeout(conn *net.TCPConn, timeout time.Duration) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return // it is closed
	}
	// An error is ignored: a kernel without TCP_USER_TIMEOUT keeps its default, and broken connections are noticed later.
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(timeout.Milliseconds()))
	})
}
