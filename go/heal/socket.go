package heal

import (
	"io"
	"net"
	"time"
)

// How long a thread stays in the kernel for one read or write before it looks at its deadline again.
const blockFor = 500 * time.Millisecond

// prepare makes a connection fit for moving blocks.
func prepare(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		letBlock(tcp)
	}
}

// abort ends a connection at once. Closing alone would not wake a thread that is in the kernel for it.
func abort(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // what the kernel still holds is of no use
		_ = tcp.CloseRead()
		_ = tcp.CloseWrite()
	}
	_ = conn.Close()
}

// readFull is io.ReadFull, in as few calls into the kernel as the system allows.
func readFull(conn net.Conn, b []byte) (int, error) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		return readBlocking(tcp, b)
	}
	return io.ReadFull(conn, b)
}
