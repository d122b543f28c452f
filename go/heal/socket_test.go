package heal

import (
	"io"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func prepared(t *testing.T) (near, far *net.TCPConn) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = listener.Close() }()
	dialed, err := net.Dial("tcp", listener.Addr().String())
	require.NoError(t, err)
	accepted, err := listener.Accept()
	require.NoError(t, err)
	near, far = dialed.(*net.TCPConn), accepted.(*net.TCPConn)
	t.Cleanup(func() { abort(near); abort(far) })
	letBlock(near)
	letBlock(far)
	return near, far
}

func TestABlockingReadReturnsAtItsDeadlineWithTheBytesThatArrived(t *testing.T) {
	near, far := prepared(t)
	_, err := far.Write([]byte("abc"))
	require.NoError(t, err)
	b := make([]byte, 5)
	require.NoError(t, near.SetReadDeadline(time.Now().Add(50*time.Millisecond)))
	n, err := readFull(near, b)
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.Equal(t, "abc", string(b[:n]))

	_, err = far.Write([]byte("defgh"))
	require.NoError(t, err)
	require.NoError(t, far.Close())
	require.NoError(t, near.SetReadDeadline(time.Now().Add(time.Minute)))
	n, err = readFull(near, b)
	require.NoError(t, err)
	require.Equal(t, "defgh", string(b[:n]))
	_, err = readFull(near, b)
	require.ErrorIs(t, err, io.EOF)
}

func TestAConnectionThatEndsInABlockIsAnUnexpectedEOF(t *testing.T) {
	near, far := prepared(t)
	_, err := far.Write([]byte("abc"))
	require.NoError(t, err)
	require.NoError(t, far.Close())
	n, err := readFull(near, make([]byte, 5))
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
	require.Equal(t, 3, n)
}

func TestAbortEndsThreadsInTheKernel(t *testing.T) {
	near, _ := prepared(t)
	ended := make(chan error, 2)
	go func() { _, err := readFull(near, make([]byte, 1)); ended <- err }()
	go func() { _, err := near.Write(make([]byte, 256<<20)); ended <- err }() // more than any buffer holds
	// Usually both threads are in the kernel by then.
	time.Sleep(20 * time.Millisecond)
	abort(near)
	for range 2 {
		select {
		case err := <-ended:
			require.Error(t, err)
		case <-time.After(time.Minute):
			t.Fatal("a thread stayed in the kernel")
		}
	}
}
