package manager

import (
	"context"
	"sync/atomic"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/membership"
	"github.com/torchft/torchft/go/rankclient"
	"github.com/torchft/torchft/go/recovery"
	"github.com/torchft/torchft/go/round"
)

// direct calls a server in the same process.
type direct struct {
	server      *Server
	conn        *connection
	closed      atomic.Bool
	notices     <-chan membership.Notice
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

func (d *direct) Quorum(ctx context.Context, req rankclient.Request) (recovery.Result, error) {
	if err := d.err(); err != nil {
		return recovery.Result{}, err
	}
	a := d.server.do(ctx, rankCall{kind: quorumCall, Request: req, conn: d.conn, traceparent: tracing.ParentOf(ctx)})
	if a.err != nil {
		return recovery.Result{}, a.err
	}
	return *a.result, nil
}

func (d *direct) CheckpointMetadata(ctx context.Context, groupRank int64) (string, error) {
	if err := d.err(); err != nil {
		return "", err
	}
	a := d.server.do(ctx, rankCall{kind: metadataCall, Request: rankclient.Request{GroupRank: groupRank}})
	return a.metadata, a.err
}

func (d *direct) Vote(ctx context.Context, groupRank, step int64, vote bool) (rankclient.Decision, error) {
	if err := d.err(); err != nil {
		return rankclient.Decision{}, err
	}
	a := d.server.do(ctx, rankCall{
		kind: voteCall, Request: rankclient.Request{GroupRank: groupRank, Step: step}, vote: vote, conn: d.conn, traceparent: tracing.ParentOf(ctx),
	})
	return rankclient.Decision{Commit: a.commit, Stands: a.stands}, a.err
}

func (d *direct) Leave(ctx context.Context) error {
	if err := d.err(); err != nil {
		return err
	}
	return d.server.leave(ctx)
}

func (d *direct) Notices() <-chan membership.Notice { return d.notices }

func (d *direct) Suspect(quorumID int64, replicaID string) { d.server.suspect(quorumID, replicaID) }

func (d *direct) ReportProgress(groupRank int64, waits bool, what string) {
	d.server.feed(round.RankProgressed{GroupRank: groupRank, Waits: waits, What: what})
}

func (d *direct) ReportHealing(p membership.HealProgress) { d.server.healing(p) }

func (d *direct) ReportRecovered(r membership.Recovered) { d.server.recovered(r) }

func (d *direct) ReportCount(c rankclient.Counted) { d.server.counted(c) }

func (d *direct) RequestDrain() { d.server.feed(round.DrainAsked{}) }

// Close ends the pending calls, as the end of a connection does.
func (d *direct) Close() error {
	if !d.closed.Swap(true) {
		d.unsubscribe()
		d.server.connectionEnded(d.conn)
	}
	return nil
}
