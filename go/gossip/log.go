package gossip

import (
	"bytes"
	"context"
	"log"
	"log/slog"
)

// memberLogger hands memberlist's lines to our logger, all as debug: each packet of a stranger is an error to memberlist, and
// a caller that waits for a member gets the reason in an error of ours.
func memberLogger(to *slog.Logger) *log.Logger { return log.New(lines{to}, "", 0) }

type lines struct{ to *slog.Logger }

func (l lines) Write(line []byte) (int, error) {
	if l.to.Enabled(context.Background(), slog.LevelDebug) {
		l.to.Debug("torchft: gossip", "memberlist", string(bytes.TrimSpace(line)))
	}
	return len(line), nil
}
