package keeper

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/slots"
)

const (
	// part is how much of a slot, in bytes, a reader gets between two looks at the header.
	part = 1 << 20
	// mostConnections bounds the open connections of a port.
	mostConnections = 1000
)

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
	mux.HandleFunc("GET /snapshots/{job}/{group}/{rank}/{slot}", s.serveSlot)
	mux.HandleFunc("GET /stored/{job}/{path...}", s.serveStored)
	s.rpc = rpc.Serve(lis, gate, rpc.NewGRPC(gate, k.log), s.guard(mux), k.log)
	return s, nil
}

func (s *server) close() {
	s.rpc.Stop()
	s.transport.CloseIdleConnections()
}

// guard refuses requests without the token, and those of browsers: where there is no token, a page of any web
// site could send them.
func (s *server) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		check := s.gate.CheckToken(r.Header.Values("Authorization"))
		code, why := 0, ""
		switch {
		case check == auth.TokenMissing || check == auth.TokenWrong:
			w.Header().Set("WWW-Authenticate", "Bearer")
			code, why = http.StatusUnauthorized, check.String()
		case r.Header.Get("Origin") != "" || r.Header.Get("Sec-Fetch-Site") != "":
			code, why = http.StatusForbidden, "snapshots are for ranks: a request of a browser is refused"
		case check != auth.TokenOK && !auth.IsOwnHost(r.Host, s.names...):
			code, why = http.StatusForbidden, fmt.Sprintf("the host it asks for, %q, is no name of this one",
				r.Host)
		case !rpc.AsMember(r):
			code, why = http.StatusServiceUnavailable, "too many connections are open"
		}
		if code == 0 {
			next.ServeHTTP(w, r)
			return
		}
		s.keeper.log.Warn("torchft: a request was refused", "request", "snapshots", "from", r.RemoteAddr,
			"reason", why)
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

// serveList lists the slots of this moment. The query may name the lighthouse of the jobs. A rank that begins
// asks for it: the last report may be older than the end of the trainers before.
func (s *server) serveList(w http.ResponseWriter, r *http.Request) {
	lighthouse := r.URL.Query().Get("lighthouse")
	s.keeper.look()
	held := s.keeper.held(func(j job) bool {
		return s.mine(j) && (lighthouse == "" || lighthouse == j.settings.Lighthouse)
	})
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(held.Snapshots) // fails only if the client has gone
}

// serveSlot sends a slot in memory.
func (s *server) serveSlot(w http.ResponseWriter, r *http.Request) {
	at, known := s.find(r)
	if !known {
		refuse(w, http.StatusNotFound, "this keeper has no such slot, of a job with these settings")
		return
	}
	f, info, err := openFile(s.keeper.root, at.path)
	s.serve(w, r, at.Place, f, info, err)
}

// serveStored sends a slot on a disk, which the ranks of the job have named.
func (s *server) serveStored(w http.ResponseWriter, r *http.Request) {
	folder, of, known := s.findStored(r)
	if !known {
		refuse(w, http.StatusNotFound, "this keeper has no such slot on a disk, of a job with these settings")
		return
	}
	f, info, err := openStored(folder, of.Stored)
	s.serve(w, r, of.Place, f, info, err)
}

func (s *server) findStored(r *http.Request) (folder string, of slots.Slot, known bool) {
	s.keeper.mu.Lock()
	defer s.keeper.mu.Unlock()
	for _, j := range s.keeper.jobs {
		if !s.mine(j) || j.name != r.PathValue("job") {
			continue
		}
		for _, of := range j.Snapshots {
			if of.Stored != "" && of.Stored == r.PathValue("path") {
				return j.storedIn, of, true
			}
		}
	}
	return "", of, false
}

// serve sends a slot, or a range of it, if it is complete. Its ETag stands for its header: a reader that
// continues with If-Match gets the same snapshot or a refusal. If the slot is overwritten meanwhile, the
// connection ends before its last byte.
func (s *server) serve(
	w http.ResponseWriter, r *http.Request, at slots.Place, f *os.File, info os.FileInfo, err error,
) {
	if err != nil {
		refuse(w, http.StatusNotFound, "the slot cannot be opened: "+err.Error())
		return
	}
	defer f.Close()
	page, err := readPage(f)
	if err != nil {
		refuse(w, http.StatusInternalServerError, "the slot cannot be read: "+err.Error())
		return
	}
	held := slots.Read(at, page, info.Size())
	if held.Incomplete != "" {
		refuse(w, http.StatusConflict, "the slot is not complete: "+held.Incomplete)
		return
	}
	sum := sha256.Sum256(page)
	h := w.Header()
	h.Set("ETag", `"`+hex.EncodeToString(sum[:16])+`"`)
	h.Set("Content-Type", "application/octet-stream")
	http.ServeContent(w, r, "", time.Time{}, &steady{
		SectionReader: io.NewSectionReader(f, 0, info.Size()), file: f, page: page,
		sent:    part, // the first read checks the header
		control: http.NewResponseController(w), keeper: s.keeper,
	})
}

// find returns the place that a request names, if it is in the list of this port's jobs: no path is made of
// the request.
func (s *server) find(r *http.Request) (at place, known bool) {
	k := s.keeper
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, j := range k.jobs {
		if !s.mine(j) || j.name != r.PathValue("job") {
			continue
		}
		for _, at := range places(k.root, j) {
			name := []string{at.Group, strconv.FormatInt(at.GroupRank, 10), strconv.FormatInt(at.Slot, 10)}
			if slices.Equal(name, []string{r.PathValue("group"), r.PathValue("rank"), r.PathValue("slot")}) {
				return at, true
			}
		}
	}
	return at, false
}

// steady reads a slot as long as its header stays the same, and gives the reader some time for each part.
type steady struct {
	*io.SectionReader // of the whole file
	file              *os.File
	page              []byte // the header
	sent              int64  // since the last check
	control           *http.ResponseController
	keeper            *Keeper
}

func (s *steady) Read(p []byte) (int, error) {
	n, err := s.SectionReader.Read(p)
	at, _ := s.Seek(0, io.SeekCurrent) // cannot fail
	s.sent += int64(n)
	if s.sent >= part || at >= s.Size() || err != nil {
		s.sent = 0
		now, pageErr := readPage(s.file)
		if err != nil && at < s.Size() || pageErr != nil || !bytes.Equal(now, s.page) {
			s.keeper.log.Info("torchft: a slot was overwritten while it was read", "file", s.file.Name())
			panic(http.ErrAbortHandler) // the reader must not take it for complete
		}
		_ = s.control.SetWriteDeadline(time.Now().Add(s.keeper.cfg.progress))
	}
	return n, err
}
