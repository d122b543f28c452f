package gossip

import (
	"bytes"
	"context"
	"log"
	"log/slog"
)

// memberLogger writes memberlist's lines to the node's logger, all at level debug: memberlist logs each
// foreign packet as an error. Callers get the reason of a failure in an error of this package.
func memberLogger(to *slog.Logger) *log.Logger { return log.New(lines{to}, "", 0) }

type lines struct{ to *slog.Logger }

func (l lines) Write(line []byte) (int, error) {
	if l.to.Enabled(context.Background(), slog.LevelDebug) {
		l.to.Debug("torchft: gossip", "memberlist", string(bytes.TrimSpace(line)))
	}
	return len(line), nil
}
