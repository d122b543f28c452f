package keeper

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/rpc"
)

// mostConnections bounds the open connections of a port.
const mostConnections = 1000

// server serves the slots of the jobs with the same settings.
type server struct {
	key
	keeper    *Keeper
	address   string
	names     []string // of this host
	gate      *rpc.Gate
	rpc       *rpc.Server
	transport *http.Transport // to lighthouses
	tokens    *auth.Watched[auth.Tokens]
}

// serve opens the port for a key. A failure is logged once, and tried again.
func (k *Keeper) serve(of key) {
	s, err := k.listen(of)
	if err != nil {
		if why := err.Error(); k.failed[of] != why {
			k.failed[of] = why
			k.log.Error("torchft: the keeper serves no snapshots of jobs with these settings", "error", err)
		}
		return
	}
	delete(k.failed, of)
	k.servers[of] = s
	k.log.Info("torchft: the keeper serves snapshots", "address", s.address, "root", k.cfg.Root)
}

func (k *Keeper) listen(of key) (*server, error) {
	protection, err := of.security.Open(k.log)
	if err != nil {
		return nil, err
	}
	gate, err := rpc.NewGate(of.security, rpc.Limits{MaxConnections: mostConnections}, k.log)
	if err != nil {
		return nil, err
	}
	bind, host := k.cfg.Bind, k.cfg.Hostname
	switch {
	case of.loopback:
		bind, host = "127.0.0.1:0", "127.0.0.1"
	case bind == "":
		bind = "[::]:0"
	}
	lis, err := k.cfg.Network.Listen(bind)
	if err != nil {
		return nil, err
	}
	name, _ := os.Hostname() // one of several names
	s := &server{
		key: of, keeper: k, gate: gate, names: []string{k.cfg.Hostname, name}, tokens: protection.Tokens,
		address:   rpc.Announce(host, lis.Addr(), of.security),
		transport: rpc.HTTPTransport(k.cfg.Network, protection.Client),
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /snapshots", s.serveList)
	mux.HandleFunc("GET /snapshots/{job}/{path...}", s.serveSlot)
	s.rpc = rpc.Serve(lis, gate, rpc.NewGRPC(gate, k.log), s.guard(mux), k.log)
	return s, nil
}

func (s *server) close() {
	s.rpc.Stop()
	s.transport.CloseIdleConnections()
}

// guard refuses requests of other processes than ranks.
func (s *server) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		code, why := s.gate.Refusal(r, "the list of snapshots", "ranks")
		if code == 0 && s.gate.CheckToken(r.Header.Values("Authorization")) != auth.TokenOK &&
			!auth.IsOwnHost(r.Host, s.names...) {
			code, why = http.StatusForbidden, fmt.Sprintf("the host it asks for, %q, is no name of this one",
				r.Host)
		}
		if code == 0 {
			next.ServeHTTP(w, r)
			return
		}
		s.keeper.log.Warn("torchft: a request was refused", "request", "snapshots", "from", r.RemoteAddr,
			"reason", why)
		if code == http.StatusUnauthorized {
			w.Header().Set("WWW-Authenticate", "Bearer")
		}
		refuse(w, code, why)
	})
}

func refuse(w http.ResponseWriter, code int, why string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(map[string]string{"error": why}) // fails only if the client has gone
}

// mine reports whether a job has the settings of this port.
func (s *server) mine(j job) bool { return j.settings.Lighthouse != "" && j.key == s.key }

// serveList lists the slots of this moment. A rank that begins asks for it: the last report may be older than
// the end of the trainers before.
func (s *server) serveList(w http.ResponseWriter, _ *http.Request) {
	s.keeper.look()
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(s.keeper.held(s.mine).Snapshots) // fails only if the client has gone
}

// serveSlot sends a slot, or a range of it, whatever it holds now: a reader checks the digests of what it
// gets.
func (s *server) serveSlot(w http.ResponseWriter, r *http.Request) {
	f, err := s.open(r.PathValue("job"), r.PathValue("path"))
	if err != nil {
		refuse(w, http.StatusNotFound, err.Error())
		return
	}
	defer f.Close()
	w.Header().Set("Content-Type", "application/octet-stream")
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(s.keeper.cfg.sendTimeout))
	http.ServeContent(w, r, "", time.Time{}, f)
}

// open opens the slot that a request names, if it is in the list of this port's jobs: no path is made of the
// request.
func (s *server) open(name, file string) (*os.File, error) {
	s.keeper.mu.Lock()
	jobs := s.keeper.jobs
	s.keeper.mu.Unlock()
	for _, j := range jobs {
		if !s.mine(j) || j.name != name {
			continue
		}
		for _, of := range j.Snapshots {
			if of.Path == file {
				return s.keeper.open(j, of)
			}
		}
	}
	return nil, errors.New("this keeper has no such slot, of a job with these settings")
}
