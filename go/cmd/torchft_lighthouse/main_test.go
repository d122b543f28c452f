package main

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if args := os.Getenv(argsEnv); args != "" { // this process is a lighthouse of processes_test.go
		os.Args = append(os.Args[:1], strings.Fields(args)...)
		main()
		return
	}
	// os/signal keeps one goroutine for the life of the process.
	goleak.VerifyTestMain(m, goleak.IgnoreTopFunction("os/signal.signal_recv"),
		goleak.IgnoreTopFunction("os/signal.loop"))
}

func TestItServesUntilASignal(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		stdout, printed := io.Pipe()
		status := make(chan int, 1)
		go func() {
			status <- run([]string{"--min_replicas", "1", "--bind", "127.0.0.1:0"}, printed, io.Discard)
		}()
		line, err := bufio.NewReader(stdout).ReadString('\n')
		require.NoError(t, err)
		address, ok := strings.CutPrefix(strings.TrimSpace(line), "torchft lighthouse listening on ")
		require.True(t, ok, line)
		_, port, err := net.SplitHostPort(strings.TrimPrefix(address, "http://"))
		require.NoError(t, err)

		web := &http.Client{Transport: &http.Transport{}}
		resp, err := web.Get("http://127.0.0.1:" + port + "/status")
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		web.CloseIdleConnections()
		assert.Equal(t, http.StatusOK, resp.StatusCode)

		require.NoError(t, syscall.Kill(syscall.Getpid(), sig))
		assert.Zero(t, <-status)
	}
}

func TestHelpAndErrors(t *testing.T) {
	var stdout, stderr bytes.Buffer
	assert.Zero(t, run([]string{"--help"}, &stdout, &stderr))
	assert.Contains(t, stdout.String(), "--min_replicas")
	assert.Empty(t, stderr.String())

	assert.Equal(t, 2, run(nil, &stdout, &stderr))
	assert.Equal(t, "torchft_lighthouse: min_replicas is missing: give --min_replicas N with N of at least "+
		"1, see --help\n", stderr.String())

	lis, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, lis.Close()) }()
	stderr.Reset()
	assert.Equal(t, 1, run([]string{"--min_replicas", "1", "--bind", lis.Addr().String()}, &stdout, &stderr))
	assert.Contains(t, stderr.String(), "the port is in use")
}
