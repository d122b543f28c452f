// Package logging writes the log without blocking: a reader of the log that stops reading must not stop a server.
package logging

import (
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// mostBytes limits the pending lines, to some thousand.
const mostBytes = 1 << 20

// LastLines is how long an ending process waits until its last lines are written.
const LastLines = time.Second

var dropped atomic.Int64

// Metric counts the lines that this process could not write.
func Metric() prometheus.Collector {
	return prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "torchft_log_lines_dropped_total", Help: "Lines of the log that were dropped because the reader of the log did not keep up.",
	}, func() float64 { return float64(dropped.Load()) })
}

// Writer passes lines on to another writer that may block, such as a pipe without a reader. It keeps up to mostBytes; further
// lines are dropped, and their number is logged once the other writer accepts lines again.
type Writer struct {
	out io.Writer

	mu      sync.Mutex
	pending []byte
	untold  int             // dropped lines whose number has not been logged
	ended   chan struct{}   // closed when nothing is pending; nil: nothing is
	told    func(lines int) // logs to out how many lines were dropped
}

// To makes a Writer for out.
func To(out io.Writer) *Writer {
	log := slog.New(slog.NewTextHandler(out, nil))
	return &Writer{out: out, told: func(lines int) {
		log.Warn("torchft: lines of the log were dropped: its reader did not keep up", "lines", lines)
	}}
}

// Write queues a line and returns at once.
func (w *Writer) Write(line []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.pending)+len(line) > mostBytes {
		w.untold++
		dropped.Add(1)
		return len(line), nil
	}
	w.pending = append(w.pending, line...)
	if w.ended == nil {
		w.ended = make(chan struct{})
		go w.pass() // returns when nothing is pending; blocks for as long as the reader does not read
	}
	return len(line), nil
}

// pass writes the pending lines.
func (w *Writer) pass() {
	var lines []byte
	for {
		w.mu.Lock()
		if len(w.pending) == 0 && w.untold == 0 {
			close(w.ended)
			w.ended = nil
			w.mu.Unlock()
			return
		}
		lines, w.pending = w.pending, lines[:0]
		untold := w.untold
		w.untold = 0
		w.mu.Unlock()
		_, _ = w.out.Write(lines) // an error loses these lines: there is no other place to report it
		if untold > 0 {
			w.told(untold)
		}
	}
}

// Flush returns when all earlier lines are written, or after the timeout.
func (w *Writer) Flush(timeout time.Duration) {
	w.mu.Lock()
	ended := w.ended
	w.mu.Unlock()
	if ended == nil {
		return
	}
	late := time.NewTimer(timeout)
	defer late.Stop()
	select {
	case <-ended:
	case <-late.C:
	}
}
