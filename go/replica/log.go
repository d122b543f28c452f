package replica

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
)

// quiet is for how long an error of Raft is not repeated: a failed lighthouse causes several each second.
const quiet = time.Minute

// raftLogger writes Raft's lines at level debug, since the node logs what matters to people. Errors are
// warnings, but not each of them, and not those of connections: the node itself says which lighthouse it does
// not reach.
func raftLogger(to *slog.Logger) hclog.Logger {
	l := hclog.NewInterceptLogger(&hclog.LoggerOptions{Output: io.Discard, Level: hclog.Debug})
	l.RegisterSink(&sinkLog{to: to, said: map[string]time.Time{}})
	return l
}

type sinkLog struct {
	to *slog.Logger

	mu   sync.Mutex
	said map[string]time.Time
}

func (s *sinkLog) Accept(name string, level hclog.Level, msg string, args ...any) {
	to := slog.LevelDebug
	if level >= hclog.Error && !ofConnection(name, args) && s.isNew(msg) {
		to = slog.LevelWarn
	}
	if s.to.Enabled(context.Background(), to) {
		for i, arg := range args {
			if f, is := arg.(hclog.Format); is {
				args[i] = fmt.Sprintf(f[0].(string), f[1:]...)
			}
		}
		s.to.Log(context.Background(), to, "torchft: raft: "+msg, args...)
	}
}

// ofConnection reports whether a line is about another lighthouse, or a connection to it.
func ofConnection(name string, args []any) bool {
	return name == transportName || slices.Contains(args, any("peer")) || slices.Contains(args, any("target"))
}

// transportName is the name of the logger of Raft's connections.
const transportName = "connections"

func (s *sinkLog) isNew(msg string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if said, ok := s.said[msg]; ok && time.Since(said) < quiet {
		return false
	}
	s.said[msg] = time.Now()
	return true
}
