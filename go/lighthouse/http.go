package lighthouse

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"time"

	"google.golang.org/grpc/metadata"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/torchftpb"
)

// killTimeout bounds connecting to a manager and telling it to end.
const killTimeout = 5 * time.Second

//go:embed page.html
var pageText string

var pages = template.Must(template.New("").Funcs(template.FuncMap{"seconds": seconds}).Parse(pageText))

func seconds(ms int64) string { return fmt.Sprintf("%.1f s", float64(ms)/1000) }

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", s.serveIndex)
	mux.HandleFunc("GET /status", s.serveStatus)
	mux.HandleFunc("GET /replica/{id}/kill", s.serveKillForm)
	mux.HandleFunc("POST /replica/{id}/kill", s.serveKill)
	return mux
}

func (s *Server) serveStatus(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	_ = encoder.Encode(s.Status()) // fails only if the reader is gone
}

func (s *Server) serveIndex(w http.ResponseWriter, _ *http.Request) {
	s.render(w, "index", map[string]any{"Address": s.address, "Status": s.Status(), "Kill": s.cfg.KillToken != ""})
}

func (s *Server) serveKillForm(w http.ResponseWriter, r *http.Request) {
	s.render(w, "kill", map[string]any{"ReplicaID": r.PathValue("id")})
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

// serveKill ends a replica group. A page of another site must not be able to: a browser says where a POST
// comes from, and the token is one that such a page does not know.
func (s *Server) serveKill(w http.ResponseWriter, r *http.Request) {
	if err := http.NewCrossOriginProtection().Check(r); err != nil {
		http.Error(w, "kill is refused: the request comes from another site ("+err.Error()+")", http.StatusForbidden)
		return
	}
	authorization := r.Header.Values("Authorization")
	if len(authorization) == 0 {
		r.Body = http.MaxBytesReader(w, r.Body, 4<<10)
		if token := r.PostFormValue("token"); token != "" {
			authorization = []string{rpc.Bearer(token)}
		}
	}
	if check := rpc.CheckToken(s.cfg.KillToken, authorization); check != rpc.TokenOK {
		http.Error(w, check.String(), http.StatusForbidden)
		return
	}
	id := r.PathValue("id")
	if err := s.kill(r.Context(), id); errors.Is(err, errNoSuchReplica) {
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

func (s *Server) kill(ctx context.Context, replicaID string) error {
	address := ""
	for _, m := range s.Status().Members {
		if m.ReplicaID == replicaID {
			address = m.Address
		}
	}
	if address == "" {
		return errNoSuchReplica
	}
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	conn, err := rpc.Dial(ctx, s.cfg.Network, "manager", address, killTimeout)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	ctx = metadata.AppendToOutgoingContext(ctx, "authorization", rpc.Bearer(s.cfg.KillToken))
	_, err = torchftpb.NewManagerServiceClient(conn).Kill(ctx, &torchftpb.KillRequest{Msg: "the lighthouse was asked to"})
	return err
}
