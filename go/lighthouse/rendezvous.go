package lighthouse

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/rendezvous"
)

// longestPoll bounds how long a request of a node waits for a change before it is answered. The node sends
// the next request as soon as it has the answer. So a node that has no pending request for HeartbeatTimeout
// counts as failed; if its connection broke, for SuspectGrace. The server's ReadTimeout would end requests
// that wait much longer.
const longestPoll = 2500 * time.Millisecond

// placed is the answer to a request of a node.
type placed struct {
	View   rendezvous.View `json:"view"`
	Reason string          `json:"reason"`
	err    error
}

// rendezvousTiming returns the grace and the timeout for connections of torchrun's agents: the same as for
// connections of members.
func (c Config) rendezvousTiming() rendezvous.Timing {
	return rendezvous.Timing{Grace: c.SuspectGrace, Timeout: c.HeartbeatTimeout}
}

// serveRendezvous serves nodes of torchrun (torchft/dlrover/rendezvous.py).
func (s *Server) serveRendezvous(w http.ResponseWriter, r *http.Request) {
	if !s.admits(w, r, "the rendezvous", "torchrun") {
		return
	}
	var request rendezvous.Request
	const want = "a request of torchft/dlrover/rendezvous.py"
	if code, err := readBody(w, r, mostBody, want, &request); err != nil {
		dashboard.Refuse(w, code, err)
		return
	}
	name := cmp.Or(r.URL.Query().Get("job"), rpc.DefaultJob)
	if err := rpc.ValidateJob("job", name); err != nil {
		dashboard.Refuse(w, http.StatusBadRequest, err)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), min(longestPoll, s.cfg.HeartbeatTimeout/2))
	defer cancel()
	j, err := s.enter(name)
	if err != nil {
		dashboard.Refuse(w, http.StatusServiceUnavailable, errors.New(rpc.Message(err)))
		return
	}
	defer j.done()
	answer := j.attend(ctx, r.Context(), request)
	if answer.err != nil {
		dashboard.Refuse(w, rendezvousCodes[status.Code(answer.err)], errors.New(rpc.Message(answer.err)))
		return
	}
	dashboard.Answer(w, answer)
}

// rendezvousCodes are the HTTP status codes of refusals. Nodes retry after a code of 500 or above, and fail
// after a lower one.
var rendezvousCodes = map[codes.Code]int{
	codes.InvalidArgument: http.StatusBadRequest,
	codes.AlreadyExists:   http.StatusConflict,
	codes.Unavailable:     http.StatusServiceUnavailable,
	codes.Internal:        http.StatusInternalServerError,
}

// attend handles a request of a node, and returns the answer when the rendezvous changes or ctx ends. alive
// ends with the node's connection.
func (j *job) attend(ctx, alive context.Context, request rendezvous.Request) placed {
	j.mu.Lock()
	if j.ended != nil {
		defer j.mu.Unlock()
		return placed{err: j.ended}
	}
	id, answered := j.nodes.Add()
	j.place(rendezvous.Attended{Waiter: id, Request: request})
	j.mu.Unlock()
	select {
	case a := <-answered:
		return a
	case <-ctx.Done():
	}
	j.mu.Lock()
	if j.ended == nil {
		j.place(rendezvous.Ended{Waiter: id, Broke: alive.Err() != nil})
	}
	j.nodes.Drop(id)
	j.mu.Unlock()
	select {
	case a := <-answered:
		return a
	default:
		return placed{err: errShutdown} // the node's connection has broken, so this answer is not sent
	}
}

// place feeds the rendezvous machine one event, and carries out its actions. The caller holds mu, so nothing
// in here may block.
func (j *job) place(event rendezvous.Event) {
	_ = rpc.Guarded(j.log, "the rendezvous", func() {
		j.carryOut(j.rendezvous.Step(event, time.Now()))
	}, func(err error) {
		// a new machine starts, and learns the rounds from the nodes' next requests
		j.rendezvous = rendezvous.NewMachine(j.cfg.rendezvousTiming(), rendezvous.State{}, time.Now())
		j.nodes.AnswerAll(placed{err: err})
	})
}

func (j *job) carryOut(actions []rendezvous.Action) {
	for _, action := range actions {
		if a, ok := action.(rendezvous.Keep); ok { // before the nodes are told
			j.kept.Rendezvous = a.State
			j.keepState()
		}
	}
	for _, action := range actions {
		switch a := action.(type) {
		case rendezvous.Answer:
			j.onceKept(func() { j.nodes.Answer(a.Waiter, placed{View: a.View, Reason: a.Reason}) })
		case rendezvous.Refuse:
			code := codes.InvalidArgument
			if a.Conflict {
				code = codes.AlreadyExists
			}
			j.nodes.Answer(a.Waiter, placed{err: status.Error(code, a.Reason)})
		case rendezvous.Released:
			j.log.Info("torchft: a round of the rendezvous", "group", a.Group, "round", a.Round,
				"nodes", len(a.Nodes), "store", a.Store)
		case rendezvous.Wake:
			j.rendezvousTimer.Reset(time.Until(a.At))
		}
	}
}

// rendezvousDue feeds the rendezvous machine the event of its timer.
func (j *job) rendezvousDue() {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.ended == nil {
		j.place(rendezvous.Woken{})
	}
}
