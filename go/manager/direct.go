package manager

import (
	"context"
	"sync/atomic"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/recovery"
)

// direct calls a server in the same process.
type direct struct {
	server *Server
	conn   *connection
	closed atomic.Bool
}

func (s *Server) direct() *direct { return &direct{server: s, conn: &connection{}} }

func (d *direct) err() error {
	if d.closed.Load() {
		return status.Error(codes.Canceled, "the client is closed")
	}
	return nil
}

func (d *direct) Quorum(ctx context.Context, args QuorumArgs) (recovery.Result, error) {
	if err := d.err(); err != nil {
		return recovery.Result{}, err
	}
	return d.server.quorum(ctx, d.conn, args)
}

func (d *direct) CheckpointMetadata(ctx context.Context, groupRank int64) (string, error) {
	if err := d.err(); err != nil {
		return "", err
	}
	return d.server.checkpointMetadata(ctx, groupRank)
}

func (d *direct) ShouldCommit(ctx context.Context, groupRank, step int64, vote bool) (bool, error) {
	if err := d.err(); err != nil {
		return false, err
	}
	return d.server.shouldCommit(ctx, d.conn, groupRank, step, vote)
}

// Close ends the calls that wait, as the end of a connection does.
func (d *direct) Close() error {
	if !d.closed.Swap(true) {
		d.server.connectionEnded(d.conn)
	}
	return nil
}
