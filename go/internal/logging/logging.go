// Package logging writes the log, so that nobody who logs waits for whoever reads it.
package logging

import (
	"io"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// mostBytes is how much may wait to be written: some thousand lines.
const mostBytes = 1 << 20

// LastLines is how long the end of a process may take to write its last lines.
const LastLines = time.Second

var dropped atomic.Int64

// Metric counts the lines that this process could not write.
func Metric() prometheus.Collector {
	return prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "torchft_log_lines_dropped_total", Help: "Lines of the log that were dropped, since nobody read those before them.",
	}, func() float64 { return float64(dropped.Load()) })
}

// Writer passes lines on to another one that may block, such as a pipe that nobody reads. What it cannot keep until then it
// drops, and says so in the next line that gets through.
type Writer struct {
	out io.Writer

	mu      sync.Mutex
	pending []byte
	untold  int             // lines dropped since the last that got through
	ended   chan struct{}   // closed when nothing is pending; nil: nothing is
	told    func(lines int) // writes to out that so many were dropped
}

// To makes a Writer.
func To(out io.Writer) *Writer {
	log := slog.New(slog.NewTextHandler(out, nil))
	return &Writer{out: out, told: func(lines int) {
		log.Warn("torchft: lines of the log were dropped: nobody read those before them", "lines", lines)
	}}
}

// Write takes a line and returns at once.
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
		go w.pass() // ends with what is pending, unless the reader never reads
	}
	return len(line), nil
}

// pass writes what is pending.
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
		_, _ = w.out.Write(lines) // what the reader does not take is lost
		if untold > 0 {
			w.told(untold)
		}
	}
}

// Flush returns when all lines of before are written, or after a while.
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
