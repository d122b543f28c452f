//go:build !linux

package heal

import (
	"io"
	"net"
)

func letBlock(*net.TCPConn) {}

func readBlocking(tcp *net.TCPConn, b []byte) (int, error) { return io.ReadFull(tcp, b) }
