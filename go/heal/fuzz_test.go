package heal

import (
	"bytes"
	"context"
	"encoding/hex"
	"io"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/torchft/torchft/go/internal/testlog"
)

// logged returns the errors that the package logs during fuzzing.
func logged(f *testing.F) *testlog.Log {
	log, before := &testlog.Log{}, slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelError})))
	f.Cleanup(func() { slog.SetDefault(before) })
	return log
}

// FuzzRequests sends arbitrary bytes to a source, with a valid secret before them and without.
func FuzzRequests(f *testing.F) {
	f.Add([]byte{}, true)
	f.Add(request{op: opBlock, flags: flagChecksum}.append(nil), true)
	f.Add(request{op: opSums, block: 1<<32 - 1, expected: 1<<32 - 1}.append(nil), true)
	f.Add(request{op: opEqual, block: 1, expected: 7}.append(request{op: opSums}.append(nil)), true)
	f.Add(request{op: opSums, block: 9}.append(nil)[:7], true)
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"), false)
	f.Add(append([]byte(magic), make([]byte, secretSize)...), false)
	log := logged(f)
	s, err := Listen(20*time.Millisecond, 0, false)
	require.NoError(f, err)
	f.Cleanup(s.Close)
	source := empty(1000, 0, 300<<10)
	o, err := NewOffer(source, 64<<10)
	require.NoError(f, err)
	f.Fuzz(func(t *testing.T, sent []byte, known bool) {
		g := s.Grant(o)
		defer g.Close()
		conn, err := net.Dial("tcp", address(s))
		require.NoError(t, err)
		defer func() { _ = conn.Close() }()
		_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
		if known {
			sent = append(append([]byte(magic), g.secret[:]...), sent...)
		}
		if _, err := conn.Write(sent); err == nil {
			_ = conn.(*net.TCPConn).CloseWrite()
			_, _ = io.Copy(io.Discard, conn)
		}
		require.NotContains(t, log.Drain(), "panic")
	})
}

// FuzzAnswers makes a source answer with arbitrary bytes: the target's Wait must end, nothing outside of the
// target's memory may be written, and the target must not be done before it has received all bytes.
func FuzzAnswers(f *testing.F) {
	header := func(r response, body ...byte) []byte { return append(r.append(nil), body...) }
	f.Add([]byte{})
	f.Add(header(response{statusWithdrawn, 0, 4}, []byte("over")...))
	f.Add(header(response{statusWithdrawn, 0, 1<<32 - 1}))
	f.Add(header(response{statusOK, 0, 1000}, make([]byte, 1004)...))
	f.Add(header(response{statusOK, 7, 1 << 31}))
	f.Add(header(response{statusDiffer, 0, 0}))
	f.Add(make([]byte, 64))
	log := logged(f)
	f.Fuzz(func(t *testing.T, answer []byte) {
		lis, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		defer func() { _ = lis.Close() }()
		go func() {
			for {
				conn, err := lis.Accept()
				if err != nil {
					return
				}
				_, _ = conn.Write(answer)
				_ = conn.(*net.TCPConn).CloseWrite()
				_ = conn.SetDeadline(time.Now().Add(200 * time.Millisecond))
				_, _ = io.Copy(io.Discard, conn)
				_ = conn.Close()
			}
		}()
		guarded := make([]byte, 3000)
		for i := range guarded {
			guarded[i] = 0xa5
		}
		target := &Memory{regions: [][]byte{guarded[1000:2000:2000]}}
		fetch, err := NewFetch(target,
			Settings{BlockSize: 500, Streams: 1, StallAfter: 10 * time.Millisecond})
		require.NoError(t, err)
		// Two attempts: the default ones would take half a second longer for each input, with the same
		// result.
		fetch.retries = retries{most: 2}
		defer fetch.Close()
		require.NoError(t, fetch.Add(lis.Addr().String(), hex.EncodeToString(make([]byte, secretSize)),
			Assigned))
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		status := fetch.Wait(ctx)
		require.NoError(t, ctx.Err())
		require.False(t, status.Done && status.Received != 1000)
		for _, outside := range [][]byte{guarded[:1000], guarded[2000:]} {
			require.Equal(t, bytes.Repeat([]byte{0xa5}, 1000), outside)
		}
		require.NotContains(t, log.Drain(), "panic")
	})
}
