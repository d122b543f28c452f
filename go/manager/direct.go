package manager

import (
	"context"
	"sync/atomic"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/local"
	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/recovery"
	"github.com/torchft/torchft/go/round"
	"github.com/torchft/torchft/go/torchftpb"
)

// direct calls a server in the same process.
type direct struct {
	server      *Server
	conn        *connection
	closed      atomic.Bool
	notices     <-chan *torchftpb.Notice
	unsubscribe func()
}

func (s *Server) direct() *direct {
	d := &direct{server: s, conn: &connection{}}
	d.notices, d.unsubscribe = s.notices.Listen()
	return d
}

func (d *direct) err() error {
	if d.closed.Load() {
		return status.Error(codes.Canceled, "the client is closed")
	}
	return nil
}

func (d *direct) Quorum(ctx context.Context, req round.Request) (recovery.Result, error) {
	if err := d.err(); err != nil {
		return recovery.Result{}, err
	}
	a := d.server.do(ctx, rankCall{kind: quorumCall, Request: req, conn: d.conn,
		traceparent: tracing.ParentOf(ctx)})
	if a.err != nil {
		return recovery.Result{}, a.err
	}
	return *a.result, nil
}

func (d *direct) CheckpointMetadata(ctx context.Context, groupRank int64) (string, error) {
	if err := d.err(); err != nil {
		return "", err
	}
	a := d.server.do(ctx, rankCall{kind: metadataCall, Request: round.Request{GroupRank: groupRank}})
	return a.metadata, a.err
}

func (d *direct) Vote(ctx context.Context, groupRank, step int64, vote bool) (local.Decision, error) {
	if err := d.err(); err != nil {
		return local.Decision{}, err
	}
	a := d.server.do(ctx, rankCall{
		kind: voteCall, Request: round.Request{GroupRank: groupRank, Step: step}, vote: vote, conn: d.conn,
		traceparent: tracing.ParentOf(ctx),
	})
	return local.Decision{Commit: a.commit, Stands: a.stands}, a.err
}

func (d *direct) Leave(ctx context.Context) error {
	if err := d.err(); err != nil {
		return err
	}
	return d.server.leave(ctx)
}

func (d *direct) Notices() <-chan *torchftpb.Notice { return d.notices }

func (d *direct) Report(report *torchftpb.RankRequest) { d.server.report(d.conn, report) }

// Close ends the pending calls, as the end of a connection does.
func (d *direct) Close() error {
	if !d.closed.Swap(true) {
		d.unsubscribe()
		d.server.connectionEnded(d.conn)
	}
	return nil
}
