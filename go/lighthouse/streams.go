package lighthouse

import (
	"iter"
	"slices"

	"github.com/torchft/torchft/go/torchftpb"
)

// streams holds the open streams, by member. The job's lock guards them.
type streams struct {
	of   map[string][]*stream // a member has more than one while it replaces a half-open one
	open int
}

func (s *streams) add(one *stream) {
	if s.of == nil {
		s.of = map[string][]*stream{}
	}
	s.of[one.replicaID] = append(s.of[one.replicaID], one)
	s.open++
}

// has reports whether a stream is open.
func (s *streams) has(one *stream) bool { return slices.Contains(s.of[one.replicaID], one) }

// remove removes a stream, and reports whether it was the last one of its member.
func (s *streams) remove(one *stream) bool {
	left := s.of[one.replicaID]
	if i := slices.Index(left, one); i >= 0 {
		left = slices.Delete(left, i, i+1)
		s.open--
	}
	if len(left) > 0 {
		s.of[one.replicaID] = left
		return false
	}
	delete(s.of, one.replicaID)
	return true
}

// all iterates over the streams of all members.
func (s *streams) all() iter.Seq[*stream] {
	return func(yield func(*stream) bool) {
		for _, of := range s.of {
			for _, one := range of {
				if !yield(one) {
					return
				}
			}
		}
	}
}

// renew ends all streams, so that their members reconnect.
func (s *streams) renew() {
	for one := range s.all() {
		one.stale = true
		one.post(closing)
	}
}

// send sends a message to members, on all of their streams.
func (s *streams) send(message *torchftpb.LighthouseMessage, replicaIDs ...string) {
	news := encodeNews(message)
	for _, id := range replicaIDs {
		for _, one := range s.of[id] {
			one.post(news)
		}
	}
}

// notify sends a notice to members.
func (s *streams) notify(notice *torchftpb.Notice, replicaIDs ...string) {
	s.send(noticeMessage(notice), replicaIDs...)
}

func noticeMessage(notice *torchftpb.Notice) *torchftpb.LighthouseMessage {
	return &torchftpb.LighthouseMessage{Message: &torchftpb.LighthouseMessage_Notice{Notice: notice}}
}

// drained asks a member to leave; who requested that is the reason.
func drained(reason string) *torchftpb.Notice {
	return &torchftpb.Notice{Kind: torchftpb.Notice_DRAINED, Reason: reason}
}

// closing tells a member that its stream ends.
var closing = encodeNews(&torchftpb.LighthouseMessage{
	Message: &torchftpb.LighthouseMessage_Closing{Closing: true},
})

func (s *streams) close() {
	for one := range s.all() {
		one.post(closing)
	}
}
