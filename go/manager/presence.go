package manager

import (
	"context"
	"time"

	"google.golang.org/grpc/stats"

	"github.com/torchft/torchft/go/round"
	"github.com/torchft/torchft/go/torchftpb"
)

// connection is one client's connection, with the ranks that made calls on it. The server's lock guards it.
type connection struct {
	ranks map[int64]struct{}
	ended bool
}

// presence counts the open connections of each rank. When the last connection of a rank breaks, the rank
// counts as disconnected, so that the other ranks of the group learn of a failure at once and not by a
// timeout.
type presence struct {
	open         map[int64]int
	disconnected map[int64]time.Time // since when
}

func (p *presence) seen(c *connection, groupRank int64) {
	if _, known := c.ranks[groupRank]; known || c.ended {
		return
	}
	if c.ranks == nil {
		c.ranks = map[int64]struct{}{}
	}
	if p.open == nil {
		p.open, p.disconnected = map[int64]int{}, map[int64]time.Time{}
	}
	c.ranks[groupRank] = struct{}{}
	p.open[groupRank]++
	delete(p.disconnected, groupRank)
}

// end removes a connection, and returns the ranks that have no other connection.
func (p *presence) end(c *connection) (disconnected []int64) {
	if c.ended {
		return nil
	}
	c.ended = true
	for groupRank := range c.ranks {
		if p.open[groupRank]--; p.open[groupRank] == 0 {
			delete(p.open, groupRank)
			p.disconnected[groupRank] = time.Now()
			disconnected = append(disconnected, groupRank)
		}
	}
	return disconnected
}

// rankGrace is how long a rank may take to reconnect before its group is reported as incomplete.
const rankGrace = 200 * time.Millisecond

// present records that a rank has reconnected, before its next request.
func (s *Server) present(c *connection, groupRank int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || c == nil || !s.has(groupRank) {
		return
	}
	s.presence.seen(c, groupRank)
	s.step(round.RankBack{GroupRank: groupRank})
}

func (s *Server) connectionEnded(c *connection) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, groupRank := range s.presence.end(c) {
		if !s.closed {
			s.log.Info("torchft: a rank's connection ended", "group_rank", groupRank)
		}
		s.step(round.RankDisconnected{GroupRank: groupRank})
		s.expectWithinGrace(groupRank)
	}
}

// expectWithinGrace reports this group as incomplete after rankGrace, unless the rank is back by then. If it
// comes back and is disconnected again, a later call has its grace. The caller holds mu.
func (s *Server) expectWithinGrace(groupRank int64) {
	if s.closed {
		return
	}
	since := s.presence.disconnected[groupRank]
	time.AfterFunc(rankGrace, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if now, still := s.presence.disconnected[groupRank]; still && now.Equal(since) && !s.closed {
			s.step(round.StillDisconnected{GroupRank: groupRank})
		}
	})
}

// lighthouseReached repeats the reports of disconnected ranks and of a broken collective: this lighthouse may
// not have received them, because the stream was broken at that time, or another lighthouse served then.
// Without its report, a lighthouse keeps a group whose manager server answers, and the other groups would
// wait for a rank that has failed; and a leader would wait for the heartbeats of a member that failed
// together with the former leader. A repeated report does no harm: the lighthouse ignores that of a rank if
// the group has a pending request, and that of a collective is of the latest round.
func (s *Server) lighthouseReached() {
	s.reportSuspected()
	s.mu.Lock()
	defer s.mu.Unlock()
	for groupRank := range s.presence.disconnected {
		s.expectWithinGrace(groupRank)
	}
	if !s.closed {
		s.step(round.Reached{})
	}
}

// reportSuspected reports the last broken collective of the latest round, if there was one.
func (s *Server) reportSuspected() {
	if last := s.suspected.Load(); last != nil {
		s.membership.Report(&torchftpb.MemberMessage{
			Message: &torchftpb.MemberMessage_Suspected{Suspected: last},
		})
	}
}

// connectionTracker is a stats.Handler: it finds the connection of each call, and reports the end of a
// connection to the server.
type connectionTracker struct{ server *Server }

type connectionKey struct{}

func connectionOf(ctx context.Context) *connection {
	c, _ := ctx.Value(connectionKey{}).(*connection)
	return c
}

func (connectionTracker) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context {
	return context.WithValue(ctx, connectionKey{}, &connection{})
}

func (t connectionTracker) HandleConn(ctx context.Context, event stats.ConnStats) {
	if _, ended := event.(*stats.ConnEnd); ended {
		t.server.connectionEnded(connectionOf(ctx))
	}
}

func (connectionTracker) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

func (connectionTracker) HandleRPC(context.Context, stats.RPCStats) {}
