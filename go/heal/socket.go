package heal

import (
	"io"
	"net"
	"time"
)

// blockFor is how long a thread may block in the kernel for one read or write before it checks its deadline.
const blockFor = 500 * time.Millisecond

// prepare makes reads and writes of a connection block in the kernel, which is faster for large blocks
// (letBlock).
func prepare(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		letBlock(tcp)
	}
}

// abort ends a connection at once. Close alone would not wake a thread that is blocked on it in the kernel.
func abort(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // drop bytes that the kernel has not sent: the transfer has ended
		_ = tcp.CloseRead()
		_ = tcp.CloseWrite()
	}
	_ = conn.Close()
}

// readFull is io.ReadFull with as few system calls as possible.
func readFull(conn net.Conn, b []byte) (int, error) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		return readBlocking(tcp, b)
	}
	return io.ReadFull(conn, b)
}
