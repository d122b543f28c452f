package heal

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"
	"time"
)

// blockFor is how long a thread may block in the kernel for one read or write before it checks its deadline.
const blockFor = 500 * time.Millisecond

// letBlock makes reads and writes block in the kernel. Go's sockets do not: a large read becomes many small
// ones with a goroutine switch and a poll between them, which together take as long as the copy itself. A
// call that blocks for blockFor returns EAGAIN, and Go waits for the socket with its poller until the
// deadline, as for any other one.
func letBlock(conn *net.TCPConn) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		limit := syscall.NsecToTimeval(blockFor.Nanoseconds())
		for _, option := range []int{syscall.SO_RCVTIMEO, syscall.SO_SNDTIMEO} {
			if syscall.SetsockoptTimeval(int(fd), syscall.SOL_SOCKET, option, &limit) != nil {
				return // do not let reads block: without this timeout a thread could block for ever
			}
		}
		_ = syscall.SetNonblock(int(fd), false)
	})
}

// abort ends a connection at once. Close alone would not wake a thread that is blocked on it in the kernel.
func abort(conn *net.TCPConn) {
	_ = conn.SetLinger(0) // drop bytes that the kernel has not sent: the transfer has ended
	_ = conn.CloseRead()
	_ = conn.CloseWrite()
	_ = conn.Close()
}

// readFull is io.ReadFull with as few system calls as possible. If it fails, done is the number of bytes that
// were read.
func readFull(conn *net.TCPConn, b []byte) (done int, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	for done < len(b) {
		n, failed := 0, error(nil)
		err := raw.Read(func(fd uintptr) bool {
			n, _, failed = syscall.Recvfrom(int(fd), b[done:], syscall.MSG_WAITALL)
			// On EAGAIN, raw.Read waits for data or the deadline, and calls again.
			return !errors.Is(failed, syscall.EAGAIN)
		})
		switch {
		case err != nil:
			return done, err
		case errors.Is(failed, syscall.EINTR): // Go's own signals
		case failed != nil:
			return done, os.NewSyscallError("recvfrom", failed)
		case n == 0 && done == 0:
			return done, io.EOF
		case n == 0:
			return done, io.ErrUnexpectedEOF
		}
		done += max(0, n)
	}
	return done, nil
}
