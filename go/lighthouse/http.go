package lighthouse

import (
	"cmp"
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"time"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/torchftpb"
)

// killTimeout bounds connecting to a manager and telling it to end.
const killTimeout = 5 * time.Second

//go:embed page.html
var pageText string

var pages = template.Must(template.New("").Parse(pageText))

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	for _, path := range []string{"/{$}", "/app.js", "/style.css", "/api/v1/"} {
		mux.HandleFunc("GET "+path, s.serveBoard)
	}
	mux.HandleFunc("GET /status", s.serveStatus)
	mux.HandleFunc("GET /jobs", s.serveJobs)
	mux.Handle("GET /metrics", dashboard.Metrics(s.boards))
	mux.HandleFunc("GET /replica/{id}/kill", s.serveKillForm)
	mux.HandleFunc("POST /replica/{id}/kill", s.guarded("kill", s.serveKill))
	return mux
}

// serveStatus tells of the job that the query names, else of the default one.
func (s *Server) serveStatus(w http.ResponseWriter, r *http.Request) {
	if j := s.jobFor(w, r); j != nil {
		s.json(w, j.status())
	}
}

// serveJobs tells of all jobs in short.
func (s *Server) serveJobs(w http.ResponseWriter, _ *http.Request) { s.json(w, s.Overview()) }

func (s *Server) json(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	_ = encoder.Encode(value) // fails only if the reader is gone
}

// serveBoard shows the job that the query names, else the default one.
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

// jobFor is the job that a request is about; it answers a request about no job.
func (s *Server) jobFor(w http.ResponseWriter, r *http.Request) *job {
	name := cmp.Or(r.URL.Query().Get("job"), rpc.DefaultJob)
	j := s.find(name)
	if j == nil {
		http.Error(w, fmt.Sprintf("job %q is not known to this lighthouse; see /jobs", name), http.StatusNotFound)
	}
	return j
}

func (s *Server) serveKillForm(w http.ResponseWriter, r *http.Request) {
	s.render(w, "kill", map[string]any{"ReplicaID": r.PathValue("id"), "Token": s.cfg.Security.HasTokens()})
}

func (s *Server) render(w http.ResponseWriter, page string, data any) {
	h := w.Header()
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Cache-Control", "no-store")
	h.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'")
	if err := pages.ExecuteTemplate(w, page, data); err != nil {
		s.log.Warn("torchft: the status page was not sent", "error", err)
	}
}

// serveKill ends a replica group.
func (s *Server) serveKill(w http.ResponseWriter, r *http.Request) {
	id := r.PathValue("id")
	if err := s.kill(r.Context(), id, "somebody at "+r.RemoteAddr+" asked for it"); errors.Is(err, errNoSuchReplica) {
		http.Error(w, fmt.Sprintf("replica %q is not known to this lighthouse, or did not say where its manager is", id), http.StatusNotFound)
		return
	} else if err != nil {
		http.Error(w, fmt.Sprintf("replica %q was not ended: %s", id, rpc.Message(err)), http.StatusBadGateway)
		return
	}
	s.log.Warn("torchft: ended a replica group on request", "replica_id", id, "from", r.RemoteAddr)
	if _, err := fmt.Fprintf(w, "replica %q was told to end\n", id); err != nil {
		s.log.Debug("torchft: the answer to kill was not sent", "error", err)
	}
}

var errNoSuchReplica = errors.New("no such replica")

func (j *job) addressOf(replicaID string) string {
	for _, m := range j.status().Members {
		if m.ReplicaID == replicaID {
			return m.Address
		}
	}
	return ""
}

// kill ends a replica group, of whatever job.
func (s *Server) kill(ctx context.Context, replicaID, why string) (err error) {
	address := ""
	for _, j := range s.allJobs() {
		if address = j.addressOf(replicaID); address != "" {
			defer func() {
				if err == nil {
					j.board.Record(dashboard.Event{Time: time.Now(), Kind: dashboard.Killed, Left: []string{replicaID}, Reason: why})
				}
			}()
			break
		}
	}
	if address == "" {
		return errNoSuchReplica
	}
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	// A manager on this host knows by the loopback address that it may trust this lighthouse.
	conn, err := s.security().Dial(ctx, rpc.PreferLoopback(s.cfg.Network), "manager", address, killTimeout)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	_, err = torchftpb.NewManagerServiceClient(conn).Kill(ctx, &torchftpb.KillRequest{Msg: "the lighthouse was asked to"})
	return err
}
