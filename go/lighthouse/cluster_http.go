package lighthouse

import (
	"context"
	_ "embed"
	"html/template"
	"net/http"
	"time"

	"github.com/torchft/torchft/go/dashboard"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/replica"
)

// one is the body of a request about a lighthouse of the cluster.
type one struct {
	Address string `json:"address"`
}

func (o one) check() error {
	_, err := rpc.ParseAddress("address", o.Address)
	return err
}

func (one) want() string { return `{"address": "http://host:port"}` }

// changeTime bounds a change of the cluster's members: a new one has to learn the cluster first. `torchft
// cluster` waits somewhat longer.
const changeTime = 10 * time.Second

// change returns what a route that adds or removes a lighthouse does.
func (c *cluster) change(
	what string, do func(ctx context.Context, address string) error,
) func(http.ResponseWriter, *http.Request, one) {
	return func(w http.ResponseWriter, r *http.Request, body one) {
		ctx, cancel := context.WithTimeout(r.Context(), changeTime)
		defer cancel()
		if err := do(ctx, body.Address); err != nil {
			dashboard.Refuse(w, http.StatusConflict, err)
			return
		}
		c.server.log.Warn("torchft: the cluster was changed on request", "lighthouse", body.Address,
			"done", what, "from", r.RemoteAddr)
		dashboard.Answer(w, done{Address: body.Address, Done: what})
	}
}

// serve serves what this lighthouse knows of its cluster.
func (c *cluster) serve(w http.ResponseWriter, _ *http.Request) { c.server.json(w, c.node.Status()) }

// status returns what this lighthouse knows of its cluster, nil if it is in none.
func (c *cluster) status() *replica.Status {
	if c == nil {
		return nil
	}
	status := c.node.Status()
	return &status
}

// unready returns why this lighthouse takes no part in its cluster; empty if it does.
func (c *cluster) unready() string {
	if c == nil {
		return ""
	}
	trouble := c.node.Status().Trouble
	if trouble == "" {
		return ""
	}
	return "this lighthouse takes no part in its cluster: " + trouble
}

// serveLeaderless answers a request while no lighthouse of the cluster leads.
func (c *cluster) serveLeaderless(w http.ResponseWriter, r *http.Request) {
	why := rpc.Message(c.notLeading())
	w.Header().Set("Retry-After", "1")
	if r.URL.Path != "/" {
		refusalOf(r)(w, http.StatusServiceUnavailable, why)
		return
	}
	h := w.Header()
	h.Set("Refresh", "1")
	h.Set("Content-Type", "text/html; charset=utf-8")
	h.Set("Cache-Control", "no-store")
	h.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'")
	w.WriteHeader(http.StatusServiceUnavailable)
	// fails only if the client has disconnected
	_ = leaderless.Execute(w, map[string]any{"Why": why, "Cluster": c.node.Status()})
}

//go:embed leaderless.html
var leaderlessText string

var leaderless = template.Must(template.New("leaderless").Parse(leaderlessText))
