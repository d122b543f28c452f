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

// What the lighthouse wants to know of members: whether they are alive, and what they do.

// checkTime is how long a member that its peers suspect may take to give a sign of life.
const checkTime = time.Second

// check looks for a sign of life. A member that has a stream gets a word and has to answer it: the kernel of a stopped
// process, and a host that vanished a moment ago, keep connections open. All others are connected to. The caller holds mu.
func (j *job) check(p quorum.Check) {
	var streams []*stream
	var before []int64
	for one := range j.streams.each(p.ReplicaID) {
		streams, before = append(streams, one), append(before, one.heard.Load())
		one.post(outgoing{news: wordOf(&torchftpb.LighthouseMessage{Message: &torchftpb.LighthouseMessage_Probe{Probe: true}})})
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
		j.log.Info("torchft: peers suspect a member", "quorum_id", p.QuorumID, "member", p.ReplicaID, "reached", reached, "reason", reason)
		_ = j.feed(quorum.Checked{ReplicaID: p.ReplicaID, QuorumID: p.QuorumID, Reached: reached, Reason: reason})
	})
}

// open reports whether one of the streams has not broken.
func open(streams []*stream) bool {
	return slices.ContainsFunc(streams, func(s *stream) bool { return !s.ended.Load() })
}

// spoke waits for a message on one of the streams that are open.
func (j *job) spoke(streams []*stream, before []int64) bool {
	deadline := time.NewTimer(checkTime)
	defer deadline.Stop()
	look := time.NewTicker(checkTime / 200)
	defer look.Stop()
	for {
		for i, one := range streams {
			if one.heard.Load() != before[i] {
				return true
			}
		}
		if !open(streams) {
			return false
		}
		select {
		case <-look.C:
		case <-deadline.C:
			return false
		case <-j.stop:
			return true // nobody is to be blamed for that
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
		return fmt.Errorf("its host is there, and its port refuses connections: %w", err)
	case ctx.Err() != nil:
		return fmt.Errorf("no answer within %s: %w", checkTime, err)
	default:
		return err
	}
}

// askProgress asks members what they do. The caller holds mu.
func (j *job) askProgress(ids []string, now time.Time) {
	word := wordOf(&torchftpb.LighthouseMessage{Message: &torchftpb.LighthouseMessage_ProgressAsked{ProgressAsked: true}})
	for _, id := range ids {
		for one := range j.streams.each(id) {
			one.post(outgoing{news: word})
		}
		if len(j.streams.of[id]) == 0 {
			// A peer of upstream cannot say what it does: it gets the benefit of the doubt.
			j.machine.Step(quorum.Progressed{ReplicaID: id, Progress: quorum.Progress{Phase: "not known", Waits: true}}, now) // of the same time: there is nothing else to do about it
		}
	}
}

func wordOf(message *torchftpb.LighthouseMessage) []rpc.Encoded {
	encoded, err := proto.Marshal(message)
	if err != nil { // a name that is no UTF-8, which no stream and no call lets in
		return []rpc.Encoded{}
	}
	return []rpc.Encoded{encoded}
}
