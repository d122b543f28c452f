package heal

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"
)

// letBlock lets reads and writes wait in the kernel. Go's own sockets never do: a large read becomes many small ones, a
// goroutine switch and a turn of the poller between each two, which takes as much time again as the copy. The kernel
// gives up after blockFor; Go then waits by its poller until the deadline, as for any other socket.
func letBlock(tcp *net.TCPConn) {
	raw, err := tcp.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		limit := syscall.NsecToTimeval(blockFor.Nanoseconds())
		for _, option := range []int{syscall.SO_RCVTIMEO, syscall.SO_SNDTIMEO} {
			if syscall.SetsockoptTimeval(int(fd), syscall.SOL_SOCKET, option, &limit) != nil {
				return // without the limit a thread could stay for ever
			}
		}
		_ = syscall.SetNonblock(int(fd), false)
	})
}

// readBlocking fills b. What has arrived when it fails counts.
func readBlocking(tcp *net.TCPConn, b []byte) (done int, err error) {
	raw, err := tcp.SyscallConn()
	if err != nil {
		return 0, err
	}
	for done < len(b) {
		n, failed := 0, error(nil)
		err := raw.Read(func(fd uintptr) bool {
			n, _, failed = syscall.Recvfrom(int(fd), b[done:], syscall.MSG_WAITALL)
			return !errors.Is(failed, syscall.EAGAIN) // else Go waits until there is something, or the deadline
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
