package rpc

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// alone runs the test in a second process with its own network namespace, in which the loopback interface is down. In that process
// it returns true.
func alone(t *testing.T) bool {
	const name = "TORCHFT_TEST_ALONE"
	if os.Getenv(name) != "" {
		return true
	}
	again := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
	again.Env = append(os.Environ(), name+"=1")
	again.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET,
		UidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}},
	}
	output, err := again.CombinedOutput()
	if _, ran := errors.AsType[*exec.ExitError](err); err != nil && !ran {
		t.Skip("this system makes no network for a test:", err)
	}
	require.NoError(t, err, string(output))
	return false
}

// loopback turns the loopback interface up or down.
func loopback(t *testing.T, up bool) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer func() { require.NoError(t, unix.Close(fd)) }()
	request, err := unix.NewIfreq("lo")
	require.NoError(t, err)
	if up {
		request.SetUint16(unix.IFF_UP)
	}
	require.NoError(t, unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request))
}

// A vanished host acknowledges nothing, and does not reset the connection either.
func TestAConnectionToAVanishedHostIsClosed(t *testing.T) {
	if !alone(t) {
		return
	}
	loopback(t, true)
	lis, err := TCP.Listen("127.0.0.1:0")
	require.NoError(t, err)
	defer func() { _ = lis.Close() }()
	ended := func(network Network) <-chan error {
		conn, err := network.Dial(context.Background(), lis.Addr().String())
		require.NoError(t, err)
		var tasks sync.WaitGroup
		t.Cleanup(func() {
			_ = conn.Close()
			tasks.Wait()
		})
		require.NoError(t, conn.SetReadDeadline(time.Now().Add(2*time.Second)))
		end := make(chan error, 1)
		tasks.Go(func() {
			_, err := conn.Read(make([]byte, 1))
			end <- err
		})
		tasks.Go(func() { // until the connection has ended
			for err := error(nil); err == nil; time.Sleep(100 * time.Millisecond) {
				_, err = conn.Write([]byte("alive"))
			}
		})
		return end
	}
	limited, unlimited := ended(WithUserTimeout(TCP, 500*time.Millisecond)), ended(TCP)
	loopback(t, false)
	vanished := time.Now()
	assert.ErrorIs(t, <-limited, syscall.ETIMEDOUT)
	assert.Less(t, time.Since(vanished), 2*time.Second)
	assert.ErrorIs(t, <-unlimited, os.ErrDeadlineExceeded)
}
