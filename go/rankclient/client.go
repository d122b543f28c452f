// Package rankclient is the client that a rank uses to call its group's manager server. A rank in the server's own process calls it
// directly (Register). Other ranks keep a stream open, their session; an upstream server, which has no sessions, gets unary calls.
package rankclient

import (
	"context"
	"time"

	"google.golang.org/grpc"

	"github.com/torchft/torchft/go/internal/local"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/tracing"
	"github.com/torchft/torchft/go/internal/wire"
	"github.com/torchft/torchft/go/membership"
	"github.com/torchft/torchft/go/recovery"
	"github.com/torchft/torchft/go/round"
	"github.com/torchft/torchft/go/torchftpb"
)

// Request is a rank's request for the next quorum, Decision the outcome of a vote.
type (
	Request  = round.Request
	Decision = local.Decision
)

// Client is one rank's connection to a manager server. To a server in the same process it is direct, without
// a network. Calls may run at the same time. Each ends at its context's deadline.
type Client struct {
	peer string
	local.Calls
}

// Dial connects to the manager server at addr, and retries until connectTimeout is over.
func Dial(ctx context.Context, addr string, connectTimeout time.Duration, with rpc.Dialing) (*Client, error) {
	peer := "manager at " + addr
	if !with.NoShortcut {
		if calls := local.Connect(with.Network, addr); calls != nil {
			return &Client{peer: peer, Calls: calls}, nil
		}
	}
	conn, err := rpc.DialSecurely(ctx, with.Security, with.Network, "manager", addr, connectTimeout)
	if err != nil {
		return nil, err
	}
	return &Client{peer: peer, Calls: newSession(conn)}, nil
}

// Quorum waits until every rank of the group has asked and the lighthouse has answered.
func (c *Client) Quorum(ctx context.Context, req Request) (recovery.Result, error) {
	r, err := c.Calls.Quorum(ctx, req)
	return r, rpc.Wrap("quorum", c.peer, err)
}

// CheckpointMetadata returns the checkpoint address that a rank of the server's group announced last.
func (c *Client) CheckpointMetadata(ctx context.Context, groupRank int64) (string, error) {
	metadata, err := c.Calls.CheckpointMetadata(ctx, groupRank)
	return metadata, rpc.Wrap("checkpoint_metadata", c.peer, err)
}

// ShouldCommit waits until every rank of the group has voted on the step, and returns true if all votes are true.
func (c *Client) ShouldCommit(ctx context.Context, groupRank, step int64, vote bool) (bool, error) {
	d, err := c.Vote(ctx, groupRank, step, vote)
	return d.Commit, err
}

// Vote does the same as ShouldCommit, and returns more.
func (c *Client) Vote(ctx context.Context, groupRank, step int64, vote bool) (Decision, error) {
	d, err := c.Calls.Vote(ctx, groupRank, step, vote)
	return d, rpc.Wrap("should_commit", c.peer, err)
}

// Leave announces that the group has completed its last step, and waits until its peers no longer need its data.
func (c *Client) Leave(ctx context.Context) error {
	return rpc.Wrap("leave", c.peer, c.Calls.Leave(ctx))
}

// Suspect reports a failed collective of a quorum, and the suspected member; empty if it is not known.
func (c *Client) Suspect(quorumID int64, replicaID string) {
	c.Report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Suspected{
		Suspected: &torchftpb.PeerSuspected{QuorumId: quorumID, ReplicaId: replicaID},
	}})
}

// ReportProgress answers ProgressAsked: whether the rank waits for other groups, and its activity in words.
func (c *Client) ReportProgress(groupRank int64, waits bool, what string) {
	c.Report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Progress{
		Progress: &torchftpb.RankProgress{GroupRank: groupRank, Waits: waits, What: what},
	}})
}

// ReportHealing reports the progress of a heal.
func (c *Client) ReportHealing(p *torchftpb.HealProgress) {
	c.Report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Healing{Healing: p}})
}

// ReportRecovered reports the cost of a recovery.
func (c *Client) ReportRecovered(r *torchftpb.Recovered) {
	c.Report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Recovered{Recovered: r}})
}

// ReportCount adds to a counter of the server.
func (c *Client) ReportCount(counted *torchftpb.Counted) {
	c.Report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Counted{Counted: counted}})
}

// RequestDrain requests that the group leaves. The request may be lost: Request.Drain repeats it.
func (c *Client) RequestDrain() {
	c.Report(&torchftpb.RankRequest{Request: &torchftpb.RankRequest_Drain{Drain: true}})
}

// remote makes unary calls to a server over the network.
type remote struct {
	conn *grpc.ClientConn
	stub torchftpb.ManagerServiceClient
}

func quorumMessage(ctx context.Context, req Request) *torchftpb.ManagerQuorumRequest {
	message := wire.RequestToProto(req)
	message.Traceparent = tracing.ParentOf(ctx)
	return message
}

func (r *remote) Quorum(ctx context.Context, req Request) (recovery.Result, error) {
	ctx, cancel := rpc.WithDefaultDeadline(ctx)
	defer cancel()
	resp, err := r.stub.Quorum(ctx, quorumMessage(ctx, req))
	if err != nil {
		return recovery.Result{}, err
	}
	return wire.ResultFromProto(resp), nil
}

func (r *remote) CheckpointMetadata(ctx context.Context, groupRank int64) (string, error) {
	ctx, cancel := rpc.WithDefaultDeadline(ctx)
	defer cancel()
	resp, err := r.stub.CheckpointMetadata(ctx, &torchftpb.CheckpointMetadataRequest{Rank: groupRank})
	return resp.GetCheckpointMetadata(), err
}

func (r *remote) Vote(ctx context.Context, groupRank, step int64, vote bool) (Decision, error) {
	ctx, cancel := rpc.WithDefaultDeadline(ctx)
	defer cancel()
	resp, err := r.stub.ShouldCommit(ctx, &torchftpb.ShouldCommitRequest{GroupRank: groupRank, Step: step, ShouldCommit: vote})
	return Decision{Commit: resp.GetShouldCommit(), Stands: resp.GetStands()}, err
}

// Leave does nothing: an upstream server has no such call, and notices the end of the connection.
func (r *remote) Leave(context.Context) error { return nil }

func (r *remote) Notices() <-chan membership.Notice { return nil }

// Report does nothing: an upstream server accepts no reports.
func (r *remote) Report(*torchftpb.RankRequest) {}

func (r *remote) Close() error { return r.conn.Close() }
