package lighthouse

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/replica"
	"github.com/torchft/torchft/go/torchftpb"
)

// killTimeout bounds connecting to a manager and asking it to end.
const killTimeout = 5 * time.Second

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	for _, path := range []string{"GET /{$}", "GET /app.js", "GET /style.css", "/api/v1/"} {
		mux.HandleFunc(path, s.serveBoard)
	}
	mux.HandleFunc("GET /status", s.serveStatus)
	mux.HandleFunc("GET /jobs", s.serveJobs)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintln(w, "ok") // fails only if the client has disconnected
	})
	mux.HandleFunc("GET /readyz", s.serveReady)
	mux.Handle("GET /metrics", dashboard.Metrics(s.boards))
	mux.HandleFunc("POST /replica/{id}/kill", s.guarded("kill", plainly, s.serveKill))
	mux.HandleFunc("POST /rendezvous", s.serveRendezvous)
	mux.HandleFunc("/api/v1/keepers", s.serveKeepers)
	mux.HandleFunc("/api/v1/kill", ask(s, "kill", s.apiKill))
	mux.HandleFunc("/api/v1/drain", ask(s, "drain", s.apiDrain))
	mux.HandleFunc("/api/v1/max_replicas", ask(s, "max_replicas", s.apiLimit))
	mux.HandleFunc("/api/v1/scaled", ask(s, "scaled",
		s.apiNotice(dashboard.Scaled, "the number of replica groups")))
	mux.HandleFunc("/api/v1/bad_node", ask(s, "bad node",
		s.apiNotice(dashboard.BadNode, "a host should not train")))
	if s.cluster == nil {
		for _, path := range []string{"GET /cluster", "/api/v1/cluster/"} {
			mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
				refusalOf(r)(w, http.StatusNotFound,
					"this lighthouse is in no cluster: it was started without --cluster")
			})
		}
		return mux
	}
	mux.HandleFunc("GET /cluster", s.cluster.serve)
	mux.HandleFunc("/api/v1/cluster/add", ask(s, "cluster add",
		s.cluster.change("added", s.cluster.node.Add)))
	mux.HandleFunc("/api/v1/cluster/remove", ask(s, "cluster remove",
		s.cluster.change("removed", s.cluster.node.Remove)))
	return s.cluster.forwardHTTP(mux)
}

// serveStatus serves the status of the job named in the query, or of the default job.
func (s *Server) serveStatus(w http.ResponseWriter, r *http.Request) {
	if j := s.jobFor(w, r); j != nil {
		s.json(w, struct {
			dashboard.Status
			Cluster *replica.Status `json:"cluster,omitempty"`
		}{j.shown(), s.cluster.status()})
	}
}

// serveJobs serves the summaries of all jobs.
func (s *Server) serveJobs(w http.ResponseWriter, _ *http.Request) { s.json(w, s.Overview()) }

func (s *Server) json(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	_ = encoder.Encode(value) // fails only if the client has disconnected
}

// serveReady reports whether this lighthouse serves members, or would if it led its cluster.
func (s *Server) serveReady(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	if closed {
		plainly(w, http.StatusServiceUnavailable, rpc.Message(errShutdown))
		return
	}
	if why := s.cluster.unready(); why != "" {
		plainly(w, http.StatusServiceUnavailable, why)
		return
	}
	_, _ = fmt.Fprintln(w, "ok")
}

// serveBoard serves the dashboard of the job named in the query, or of the default job.
func (s *Server) serveBoard(w http.ResponseWriter, r *http.Request) {
	if j := s.jobFor(w, r); j != nil {
		j.site.ServeHTTP(w, r)
	}
}

func (s *Server) boards() []*dashboard.Feed {
	boards := []*dashboard.Feed{}
	for _, j := range s.allJobs() {
		boards = append(boards, j.board)
	}
	return boards
}

// jobFor returns the job named in the query of a request, or the default job. If the job is not known, jobFor
// answers the request and returns nil.
func (s *Server) jobFor(w http.ResponseWriter, r *http.Request) *job {
	name := cmp.Or(r.URL.Query().Get("job"), rpc.DefaultJob)
	j := s.find(name)
	if j == nil {
		refusalOf(r)(w, http.StatusNotFound, unknownJob(name).Error())
	}
	return j
}

func unknownJob(name string) error {
	return fmt.Errorf("no group of job %q has joined at this lighthouse; "+
		"GET /jobs lists the jobs that it has", name)
}

// refusalOf returns how an error is answered: in JSON for the API, and for the command torchft.
func refusalOf(r *http.Request) func(w http.ResponseWriter, code int, why string) {
	if strings.HasPrefix(r.URL.Path, "/api/") || r.Header.Get("Accept") == "application/json" {
		return inJSON
	}
	return plainly
}

func inJSON(w http.ResponseWriter, code int, why string) { dashboard.Refuse(w, code, errors.New(why)) }

// plainly answers with an error in plain text.
func plainly(w http.ResponseWriter, code int, why string) { http.Error(w, why, code) }

// killFor ends a replica group on request; code is the HTTP status of an error.
func (s *Server) killFor(r *http.Request, id string) (code int, err error) {
	j, code, err := s.holder(r, id, func(m dashboard.Member) bool { return m.Address != "" })
	if err != nil {
		return code, err
	}
	if err := j.kill(r.Context(), id, "requested from "+r.RemoteAddr); err != nil {
		return http.StatusBadGateway, fmt.Errorf("member %q was not ended: %s", id, rpc.Message(err))
	}
	j.log.Warn("torchft: ended a replica group on request", "replica_id", id, "from", r.RemoteAddr)
	return 0, nil
}

// holder returns the job of the member that a request names: the job in the query, or the only job that has
// such a member. code is the HTTP status of an error.
func (s *Server) holder(
	r *http.Request, id string, fits func(dashboard.Member) bool,
) (j *job, code int, err error) {
	name := r.URL.Query().Get("job")
	if name != "" && s.find(name) == nil {
		return nil, http.StatusNotFound, unknownJob(name)
	}
	var names []string
	for _, one := range s.allJobs() {
		if (name == "" || one.name == name) && fits(one.member(id)) {
			j, names = one, append(names, one.name)
		}
	}
	switch n := len(names); n {
	case 0:
		return nil, http.StatusNotFound, fmt.Errorf("member %q is not known to this lighthouse, has "+
			"failed, or has not announced its manager's address", id)
	case 1:
		return j, 0, nil
	default:
		slices.Sort(names)
		return nil, http.StatusConflict, fmt.Errorf("member %q is in the jobs %s and %s: name one, %s?job=ID",
			id, strings.Join(names[:n-1], ", "), names[n-1], r.URL.Path)
	}
}

// serveKill ends a replica group at the route of upstream.
func (s *Server) serveKill(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	if code, err := s.killFor(r, id); err != nil {
		plainly(w, code, err.Error())
		return
	}
	if _, err := fmt.Fprintf(w, "member %q was asked to end\n", id); err != nil {
		s.log.Debug("torchft: the answer to kill was not sent", "error", err)
	}
}

// member returns the status of a member; zero if it is not known.
func (j *job) member(replicaID string) dashboard.Member {
	for _, m := range j.status().Members {
		if m.ReplicaID == replicaID {
			return m
		}
	}
	return dashboard.Member{}
}

// kill ends a replica group.
func (j *job) kill(ctx context.Context, replicaID, why string) error {
	s := j.server
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	// A manager on this host accepts the request without a token if it arrives over the loopback interface.
	with := s.dialing()
	with.Network = rpc.PreferLoopback(with.Network)
	conn, err := rpc.Dial(ctx, with, "manager", j.member(replicaID).Address, killTimeout)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if _, err := torchftpb.NewManagerServiceClient(conn).Kill(ctx,
		&torchftpb.KillRequest{Msg: "requested by the lighthouse"}); err != nil {
		return err
	}
	j.board.Record(dashboard.Event{Time: time.Now(), Kind: dashboard.Killed, Left: []string{replicaID},
		Reason: why})
	return nil
}
