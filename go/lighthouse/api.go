package lighthouse

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/quorum"
)

// The routes below /api/v1/ that change something. Each takes a JSON object and answers with one, even for a
// refusal.

// mostBody bounds the body of a request, in bytes. A replica_id of rpc.MaxReplicaID bytes fits into it: JSON
// encodes each byte in at most six.
const mostBody = 16 << 10

// body is the body of a request.
type body interface {
	check() error // nil if its values are allowed
	want() string // an example
}

// about is the body of a request about a member.
type about struct {
	ReplicaID string `json:"replica_id"`
}

func (a about) check() error { return checkReplicaID(a.ReplicaID) }
func (about) want() string   { return `{"replica_id": "..."}` }

// done is the answer to a successful request, with what it named.
type done struct {
	ReplicaID string `json:"replica_id,omitempty"`
	Address   string `json:"address,omitempty"`
	Done      string `json:"done"`
}

func (s *Server) apiKill(w http.ResponseWriter, r *http.Request, body about) {
	code, err := s.killFor(r, body.ReplicaID)
	if err != nil {
		dashboard.Refuse(w, code, err)
		return
	}
	dashboard.Answer(w, done{ReplicaID: body.ReplicaID, Done: "asked to end"})
}

func (s *Server) apiDrain(w http.ResponseWriter, r *http.Request, body about) {
	j, code, err := s.holder(r, body.ReplicaID, func(m dashboard.Member) bool { return m.Healthy })
	if err != nil {
		dashboard.Refuse(w, code, err)
		return
	}
	err = j.drain(body.ReplicaID, "requested from "+r.RemoteAddr)
	switch {
	case errors.Is(err, errNoStream):
		dashboard.Refuse(w, http.StatusConflict,
			fmt.Errorf("member %q cannot be asked to leave: %w", body.ReplicaID, err))
	case err != nil:
		dashboard.Refuse(w, http.StatusServiceUnavailable, errors.New(rpc.Message(err)))
	default:
		j.log.Info("torchft: a replica group is asked to leave, on request", "replica_id", body.ReplicaID,
			"from", r.RemoteAddr)
		dashboard.Answer(w, done{ReplicaID: body.ReplicaID, Done: "asked to leave at the end of a step"})
	}
}

// limit is the body of a request that sets max_replicas of a job.
type limit struct {
	MaxReplicas int `json:"max_replicas"`
}

func (l limit) check() error {
	if l.MaxReplicas < 1 {
		return fmt.Errorf("max_replicas is %d: it must be at least 1", l.MaxReplicas)
	}
	return nil
}

func (limit) want() string { return `{"max_replicas": 4}` }

func (s *Server) apiLimit(w http.ResponseWriter, r *http.Request, body limit) {
	policy := s.cfg.Policy
	policy.MaxReplicas = body.MaxReplicas
	if err := policy.Validate(); err != nil {
		dashboard.Refuse(w, http.StatusBadRequest, err)
		return
	}
	j := s.jobFor(w, r)
	if j == nil {
		return
	}
	if err := j.feed(quorum.Limited{MaxReplicas: body.MaxReplicas}); err != nil {
		dashboard.Refuse(w, http.StatusServiceUnavailable, errors.New(rpc.Message(err)))
		return
	}
	j.log.Info("torchft: another number of groups trains", "max_replicas", body.MaxReplicas, "from",
		r.RemoteAddr)
	dashboard.Answer(w, done{Done: "set"})
}

// notice is the body of a request that records an event of which the lighthouse knows nothing itself: a
// change of the number of groups, the check of a host.
type notice struct {
	Reason string `json:"reason"`
}

func (n notice) check() error {
	if n.Reason == "" {
		return errors.New("reason is empty: it says what happens, and why")
	}
	return nil
}

func (notice) want() string { return `{"reason": "..."}` }

// mostNotices bounds the events of a minute that others tell, since without a token any host may: more would
// drive those of the job out of the history.
const mostNotices = 60

// apiNotice returns the handler that records events of this kind; what is the line of the log.
func (s *Server) apiNotice(
	kind dashboard.Kind, what string,
) func(http.ResponseWriter, *http.Request, notice) {
	return func(w http.ResponseWriter, r *http.Request, body notice) {
		j := s.jobFor(w, r)
		if j == nil {
			return
		}
		j.mu.Lock()
		room := j.notices.admit(mostNotices, time.Now())
		j.mu.Unlock()
		if !room {
			dashboard.Refuse(w, http.StatusTooManyRequests,
				fmt.Errorf("more than %d such events in a minute; allowed: %d", mostNotices, mostNotices))
			return
		}
		j.log.Info("torchft: "+what, "reason", body.Reason, "from", r.RemoteAddr)
		j.board.Record(dashboard.Event{Time: time.Now(), Kind: kind, Reason: body.Reason})
		dashboard.Answer(w, done{Done: "recorded"})
	}
}

// errNoStream reports that a member has no stream on which the lighthouse could send it a message.
var errNoStream = errors.New("it has no stream to this lighthouse, as groups of upstream have none")

// drain asks a member to leave.
func (j *job) drain(replicaID, why string) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.ended != nil {
		return j.ended
	}
	if len(j.streams.of[replicaID]) == 0 {
		return errNoStream
	}
	j.board.Record(dashboard.Event{Time: time.Now(), Kind: dashboard.Drained, Left: []string{replicaID},
		Reason: why})
	return j.step(quorum.Drained{ReplicaID: replicaID, Reason: why})
}

// ask returns the handler of a route with a body. It checks the permission before it reads the body: all
// processes of the job may record an event, from any host, since it changes nothing else.
func ask[B body](
	s *Server, what string, follow func(http.ResponseWriter, *http.Request, B),
) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost {
			w.Header().Set("Allow", http.MethodPost)
			inJSON(w, http.StatusMethodNotAllowed,
				fmt.Sprintf("%s %s is not allowed; allowed: POST", r.Method, r.URL.Path))
			return
		}
		var b B
		serve := func(w http.ResponseWriter, r *http.Request) {
			code, err := readBody(w, r, mostBody, b.want(), &b)
			if err == nil {
				code, err = http.StatusBadRequest, b.check()
			}
			if err != nil {
				dashboard.Refuse(w, code, errors.New(rpc.Message(err)))
				return
			}
			follow(w, r, b)
		}
		if _, records := any(b).(notice); !records {
			s.guarded(what, inJSON, serve)(w, r)
		} else if s.admits(w, r, what, "processes of the job") {
			serve(w, r)
		}
	}
}

// readBody reads the body of a request, of at most most bytes, to its end: before that, net/http does not
// notice that the connection has broken. If it returns an error, code is the HTTP status of the refusal. want
// is an example for the error.
func readBody(w http.ResponseWriter, r *http.Request, most int64, want string, to any) (code int, err error) {
	want = "; wanted: " + want
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, most))
	if tooLarge := (*http.MaxBytesError)(nil); errors.As(err, &tooLarge) {
		return http.StatusRequestEntityTooLarge,
			fmt.Errorf("the body has more than %d bytes%s", most, want)
	}
	if err != nil {
		return http.StatusBadRequest, fmt.Errorf("the body was not read: %w", err)
	}
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.DisallowUnknownFields()
	err = decoder.Decode(to)
	switch {
	case errors.Is(err, io.EOF):
		return http.StatusBadRequest, errors.New("there is no body" + want)
	case err != nil:
		return http.StatusBadRequest, fmt.Errorf("the body is not understood: %s%s",
			strings.TrimPrefix(err.Error(), "json: "), want)
	case decoder.More():
		return http.StatusBadRequest, errors.New("there is more than one value in the body" + want)
	}
	return 0, nil
}
