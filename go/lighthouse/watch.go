package lighthouse

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"syscall"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
	"github.com/torchft/torchft/go/torchftpb"
)

// This file has the lighthouse's questions to members: whether they are alive, and their progress.

// checkTime is how long a suspected member may take to answer.
const checkTime = time.Second

// check finds out whether a suspected member is alive. A member with a stream must answer a probe: an open
// connection is no proof, since the connection of a stopped process, or of a host that has just vanished,
// stays open. If a member has no stream, its manager server has to accept a connection. The caller holds mu.
func (j *job) check(p quorum.Check) {
	var streams []*stream
	var before []int64
	for _, one := range j.streams.of[p.ReplicaID] {
		streams, before = append(streams, one), append(before, one.received.Load())
		one.post(encodeNews(&torchftpb.LighthouseMessage{
			Message: &torchftpb.LighthouseMessage_Probe{Probe: true},
		}))
	}
	rpc.Go(&j.server.tasks, j.log, "check", func() {
		var reached bool
		var reason string
		if reached = j.spoke(streams, before); !reached {
			reason = fmt.Sprintf("no answer within %s", checkTime)
			if !open(streams) {
				err := j.connect(p.Address)
				reached, reason = err == nil, fmt.Sprint(err)
			}
		}
		j.log.Info("torchft: peers suspect a member", "quorum_id", p.QuorumID, "member", p.ReplicaID,
			"reached", reached, "reason", reason)
		_ = j.feed(quorum.Checked{ReplicaID: p.ReplicaID, QuorumID: p.QuorumID, Reached: reached,
			Reason: reason})
	})
}

// open reports whether one of the streams is still open.
func open(streams []*stream) bool {
	return slices.ContainsFunc(streams, func(s *stream) bool { return !s.ended.Load() })
}

// spoke waits for a message on one of the streams, until checkTime is over or all of them have broken.
func (j *job) spoke(streams []*stream, before []int64) bool {
	deadline := time.After(checkTime)
	look := time.Tick(checkTime / 200)
	for {
		for i, one := range streams {
			if one.received.Load() != before[i] {
				return true
			}
		}
		if !open(streams) {
			return false
		}
		select {
		case <-look:
		case <-deadline:
			return false
		case <-j.stop:
			return true // the lighthouse shuts down: the member must not count as failed for that
		}
	}
}

func (j *job) connect(address string) error {
	u, err := url.Parse(address)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), checkTime)
	defer cancel()
	conn, err := j.cfg.Network.Dial(ctx, u.Host)
	switch {
	case err == nil:
		return conn.Close()
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("its host answers, and refuses connections to its port: %w", err)
	case ctx.Err() != nil:
		return fmt.Errorf("no answer within %s: %w", checkTime, err)
	default:
		return err
	}
}

// askProgress asks members for their progress. The caller holds mu.
func (j *job) askProgress(ids []string, now time.Time) {
	j.streams.notify(&torchftpb.Notice{Kind: torchftpb.Notice_PROGRESS_ASKED}, ids...)
	for _, id := range ids {
		if len(j.streams.of[id]) == 0 {
			// An upstream member cannot answer. It counts as waiting for others, so that it is never reported
			// as stalled. it returns no actions: the event only records the answer
			j.machine.Step(quorum.Progressed{ReplicaID: id,
				Progress: quorum.Progress{What: "not known", Waits: true}}, now)
		}
	}
}

// heard is the answer to a heartbeat.
var heard = encodeNews(&torchftpb.LighthouseMessage{Message: &torchftpb.LighthouseMessage_Alive{Alive: true}})

func encodeNews(message *torchftpb.LighthouseMessage) []rpc.Encoded {
	encoded, err := proto.Marshal(message)
	if err != nil { // only for a name that is no UTF-8, and such names are refused when a member joins
		return []rpc.Encoded{}
	}
	return []rpc.Encoded{encoded}
}
