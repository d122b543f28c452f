// Package testlog keeps the log of servers for tests. It imports no package of this module, so that tests
// inside of any package can use it; internal/fttest imports the servers.
package testlog

import (
	"strings"
	"sync"
)

// Log is a writer that keeps its text. Goroutines that a test does not wait for may write while the test
// reads.
type Log struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// Count returns how many lines contain the text.
func (l *Log) Count(text string) int {
	n := 0
	for line := range strings.Lines(l.String()) {
		if strings.Contains(line, text) {
			n++
		}
	}
	return n
}

// Drain returns the lines logged since the last call, and removes them: a fuzz target reads them after each
// input.
func (l *Log) Drain() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	defer l.text.Reset()
	return l.text.String()
}

func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}
