package lighthouse

import (
	"fmt"
	"net/http"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/rpc"
)

// guarded wraps the handler of a route that changes the job. It refuses requests without permission, also
// those that a page of another site makes through a browser on this host. Such requests are recognized
// because the browser sends the page's origin and the host name that the page used; and the page does not
// know the token.
func (s *Server) guarded(
	what string, refuse func(w http.ResponseWriter, code int, why string), serve http.HandlerFunc,
) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if code, why := s.refusal(r); code != 0 {
			s.log.Warn("torchft: a request was refused", "request", what, "from", r.RemoteAddr,
				"origin", r.Header.Get("Origin"), "reason", why)
			if code == http.StatusUnauthorized {
				w.Header().Set("WWW-Authenticate", "Bearer")
			}
			refuse(w, code, what+" is refused: "+why)
			return
		}
		serve(w, r)
	}
}

// fromAnotherSite returns why a browser must not make a request for the page that it shows; empty if it may.
func fromAnotherSite(r *http.Request) (why string) {
	if err := http.NewCrossOriginProtection().Check(r); err != nil {
		return "it comes from another site (" + err.Error() + ")"
	}
	return ""
}

// refusal returns the HTTP status and the reason of a refusal; 0 if the request is accepted.
func (s *Server) refusal(r *http.Request) (code int, why string) {
	if why := fromAnotherSite(r); why != "" {
		return http.StatusForbidden, why
	}
	ending := auth.Ending{
		Token:       s.gate.CheckToken(r.Header.Values("Authorization")),
		Loopback:    auth.IsLoopback(r.RemoteAddr) && !auth.Forwarded(r.Header.Values),
		AllowRemote: s.cfg.AllowRemoteKill,
	}
	if why := ending.Refusal(); why != "" {
		if ending.Token == auth.TokenMissing || ending.Token == auth.TokenWrong {
			return http.StatusUnauthorized, why
		}
		return http.StatusForbidden, why + ", or start the lighthouse with --allow_remote_kill"
	}
	if ending.Token != auth.TokenOK && !auth.IsOwnHost(r.Host, s.cfg.Hostname, machineName()) {
		return http.StatusForbidden, fmt.Sprintf("the host it asks for, %q, is no name of this server: use "+
			"its address, localhost or %q", r.Host, s.cfg.Hostname)
	}
	return 0, ""
}

// admits refuses a request of a process of a job that lacks the token, as the calls of members are refused.
// what is the route, whose are the processes that use it.
func (s *Server) admits(w http.ResponseWriter, r *http.Request, what, whose string) bool {
	code, why := s.gate.Refusal(r, what, whose)
	if code == http.StatusUnauthorized {
		s.log.Warn("torchft: a request was refused", "request", what, "from", r.RemoteAddr, "reason", why)
		w.Header().Set("WWW-Authenticate", "Bearer")
	}
	if code != 0 {
		inJSON(w, code, why)
	}
	return code == 0
}

// dialing returns the settings of the lighthouse's calls to managers and other lighthouses. By default, the
// authority that signs the certificates of the lighthouse's clients is trusted for theirs, too.
func (s *Server) dialing() rpc.Dialing {
	security := s.cfg.Security
	if security.TLSCA == "" {
		security.TLSCA = security.TLSClientCA
	}
	return rpc.Dialing{Security: security, Network: s.cfg.Network}
}
