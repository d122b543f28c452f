package lighthouse

import (
	"context"
	"net/http"
	"net/http/httputil"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/torchftpb"
)

// A lighthouse that does not lead its cluster forwards calls and HTTP requests to the leader, so that one
// name or a load balancer can stand for all of them. The streams of members are refused with the leader's
// address instead (NotLeader).

// leaderPoll is the pause after which a lighthouse, or a call that it could not forward, looks again which
// lighthouse leads.
const leaderPoll = 20 * time.Millisecond

// forwardUnary is an interceptor. A call whose leader fails meanwhile is made again at the next one, until
// its deadline: the calls of the lighthouse's service may be repeated.
func (c *cluster) forwardUnary(
	ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler,
) (any, error) {
	if strings.HasPrefix(info.FullMethod, "/"+torchftpb.ClusterService_ServiceDesc.ServiceName+"/") {
		return handler(ctx, req)
	}
	ctx, cancel := rpc.WithDefaultDeadline(ctx)
	defer cancel()
	deadline, _ := ctx.Deadline()
	for {
		err := c.check(ctx)
		if err == nil {
			answer, err := handler(ctx, req)
			if status.Code(err) != codes.Unavailable || c.check(ctx) == nil {
				return answer, err
			}
		} else if rpc.IsForwarded(ctx) {
			return nil, err
		}
		if to := c.toLeader(); to != nil {
			answer, err := rpc.Forward(ctx, to.conn, info.FullMethod, req)
			switch {
			case err == nil:
				return answer, nil
			case ctx.Err() != nil, status.Code(err) != codes.Unavailable &&
				status.Code(err) != codes.Canceled:
				// closing the connection cancels its calls
				return nil, err
			}
		}
		if time.Now().Add(leaderPoll).After(rpc.Sooner(deadline, answerMargin)) {
			return nil, c.notLeading()
		}
		select {
		case <-ctx.Done():
			return nil, c.notLeading()
		case <-c.server.stop:
			return nil, errShutdown
		case <-time.After(leaderPoll):
		}
	}
}

// own are the routes that each lighthouse of a cluster answers for itself.
var own = map[string]bool{"/healthz": true, "/readyz": true, "/cluster": true}

// forwardHTTP wraps the handler of a lighthouse. It forwards requests to the leader while another one leads.
func (c *cluster) forwardHTTP(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if own[r.URL.Path] || c.check(r.Context()) == nil {
			h.ServeHTTP(w, r)
			return
		}
		to := c.toLeader()
		if to == nil || r.Header.Get(forwardedBy) != "" {
			c.serveLeaderless(w, r)
			return
		}
		if why := fromAnotherSite(r); why != "" {
			// the leader cannot check it: it gets its own name as the host
			refusalOf(r)(w, http.StatusForbidden, "the request is refused: "+why)
			return
		}
		local := auth.IsLoopback(r.RemoteAddr) && !auth.Forwarded(r.Header.Values) &&
			auth.IsOwnHost(r.Host, c.server.cfg.Hostname, machineName())
		ctx, cancel := context.WithCancel(r.Context())
		defer cancel()
		defer context.AfterFunc(to.ctx, cancel)()
		proxy := httputil.ReverseProxy{
			Transport:     c.http,
			FlushInterval: -1, // the page's stream of updates
			ErrorLog:      quiet,
			Rewrite: func(p *httputil.ProxyRequest) {
				p.SetURL(to.url)
				if p.In.Header.Get("Origin") != "" {
					p.Out.Header.Set("Origin", to.address)
				}
				p.Out.Header.Set(forwardedBy, c.server.address)
				if !local {
					// otherwise it is as if this lighthouse, on the same host as its client, made the request
					p.SetXForwarded()
				}
			},
			ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
				w.Header().Set("Retry-After", "1")
				plainly(w, http.StatusServiceUnavailable,
					"the lighthouse that leads, "+to.address+", does not answer: "+err.Error())
			},
		}
		proxy.ServeHTTP(w, r.WithContext(ctx))
	})
}

// forwardedBy is a header that names the lighthouse which forwarded a request: it is forwarded once at most.
const forwardedBy = "Torchft-Forwarded-By"
