// Package logging writes the log without blocking: if its reader stops, the server must continue.
package logging

import (
	"errors"
	"io"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc/grpclog"
)

// mostBytes limits the memory of the pending lines: some thousand of them.
const mostBytes = 1 << 20

// LastLines is how long an ending process waits for its last lines to be written.
const LastLines = time.Second

var dropped atomic.Int64

// Metric counts the lines that this process could not write.
func Metric() prometheus.Collector {
	return prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "torchft_log_lines_dropped_total", Help: "Lines of the log that were dropped because the " +
			"reader of the log did not keep up.",
	}, func() float64 { return float64(dropped.Load()) })
}

// Writer forwards lines to another writer that may block, such as a pipe without a reader. It queues up to
// mostBytes. Further lines are dropped, and their number is logged once the other writer accepts lines again.
type Writer struct {
	out io.Writer

	mu         sync.Mutex
	pending    []byte
	dropped    int             // lines dropped since their number was logged last
	idle       chan struct{}   // closed when all pending lines are written; nil while there are none
	logDropped func(lines int) // logs the number of dropped lines to out
}

// To returns a Writer that forwards to out.
func To(out io.Writer) *Writer {
	if file, isFile := out.(*os.File); isFile {
		out = File(file)
	}
	log := slog.New(slog.NewTextHandler(out, nil))
	return &Writer{out: out, logDropped: func(lines int) {
		log.Warn("torchft: lines of the log were dropped: its reader did not keep up", "lines", lines)
	}}
}

// File returns a writer to a file. If the file is a pipe whose reader has ended, Write returns an error.
// os.File.Write would end the process by SIGPIPE if that pipe is standard output or standard error: also the
// user's training process, in which this code runs.
func File(file *os.File) io.Writer { return pipe{file} }

type pipe struct{ file *os.File }

func (p pipe) Write(b []byte) (n int, err error) {
	conn, err := p.file.SyscallConn()
	for err == nil && n < len(b) {
		var wrote int
		var failed error
		err = conn.Write(func(fd uintptr) bool {
			wrote, failed = syscall.Write(int(fd), b[n:])
			// then conn.Write waits for room and calls again, or fails if Go cannot poll the file
			return !errors.Is(failed, syscall.EAGAIN)
		})
		n += max(0, wrote)
		switch {
		case err != nil || errors.Is(failed, syscall.EINTR):
		case failed != nil:
			err = failed
		case wrote == 0:
			err = io.ErrUnexpectedEOF
		}
	}
	return n, err
}

// GRPC passes on the errors of gRPC, whose own logger may end the process by os.Stderr: see File.
func GRPC(lines *Writer) { grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, lines)) }

// Write queues a line and returns at once.
func (w *Writer) Write(line []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.pending)+len(line) > mostBytes {
		w.dropped++
		dropped.Add(1)
		return len(line), nil
	}
	w.pending = append(w.pending, line...)
	if w.idle == nil {
		w.idle = make(chan struct{})
		go w.writePending() // returns when nothing is pending; blocks while the reader does not read
	}
	return len(line), nil
}

// writePending writes the pending lines, and those that are added meanwhile.
func (w *Writer) writePending() {
	var lines []byte
	for {
		w.mu.Lock()
		if len(w.pending) == 0 && w.dropped == 0 {
			close(w.idle)
			w.idle = nil
			w.mu.Unlock()
			return
		}
		lines, w.pending = w.pending, lines[:0]
		number := w.dropped
		w.dropped = 0
		w.mu.Unlock()
		_, _ = w.out.Write(lines) // an error loses these lines: there is no other place to report it
		if number > 0 {
			w.logDropped(number)
		}
	}
}

// Flush returns when all earlier lines are written, or after the timeout.
func (w *Writer) Flush(timeout time.Duration) {
	w.mu.Lock()
	idle := w.idle
	w.mu.Unlock()
	if idle == nil {
		return
	}
	select {
	case <-idle:
	case <-time.After(timeout):
	}
}
