package rpc

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/tap"

	"github.com/torchft/torchft/go/internal/auth"
)

// Limits bound the load that clients can cause at a server. Zero is no limit.
type Limits struct {
	// MaxConnections bounds the open connections that have made an authorized call; a further one is closed.
	// Other connections have separate limits (admitting).
	MaxConnections int
	// MaxJoins bounds the calls from one address in a second for which IsJoin is true. A further one is
	// refused, and the client retries it.
	MaxJoins int
	// IsJoin reports whether MaxJoins counts the calls of a method: those that join a job.
	IsJoin func(method string) bool
}

// Gate checks each connection and call of a server: the server's limits, TLS, and the token.
type Gate struct {
	protection auth.Protection
	limits     Limits
	joins      rate
	refused    refusals
}

// NewGate returns a gate, after reading the files of a server's security.
func NewGate(security auth.Security, limits Limits, log *slog.Logger) (*Gate, error) {
	p, err := security.Open(log)
	if err != nil {
		return nil, err
	}
	return &Gate{protection: p, limits: limits, joins: rate{most: limits.MaxJoins},
		refused: refusals{logger: log}}, nil
}

// CheckToken checks the authorization of a request over HTTP/1.1.
func (g *Gate) CheckToken(authorization []string) auth.TokenCheck {
	if g.protection.Tokens == nil {
		return auth.TokenNone
	}
	return g.protection.Tokens.Get().Check(authorization)
}

// Refusal returns why a request over HTTP of a process of a job is refused, and the code of the answer; 0: it
// is admitted, and its connection counts as a member's. Requests of browsers are always refused: where there
// is no token, a page of any web site could send them. what is the route, whose are the processes that use
// it.
func (g *Gate) Refusal(r *http.Request, what, whose string) (code int, why string) {
	check := g.CheckToken(r.Header.Values("Authorization"))
	switch {
	case check == auth.TokenMissing || check == auth.TokenWrong:
		return http.StatusUnauthorized, check.String()
	case r.Header.Get("Origin") != "" || r.Header.Get("Sec-Fetch-Site") != "":
		return http.StatusForbidden, what + " is for " + whose + ": a request of a browser is refused"
	case !AsMember(r):
		return http.StatusServiceUnavailable, "too many connections are open (max_connections)"
	}
	return 0, ""
}

// listen returns a listener that checks the connections of another one.
func (g *Gate) listen(lis net.Listener) net.Listener {
	if g.limits.MaxConnections > 0 {
		lis = newAdmitting(lis, g.limits.MaxConnections, &g.refused)
	}
	if g.protection.Server != nil {
		lis = secureListener{Listener: lis, config: g.protection.Server, refused: &g.refused}
	}
	return lis
}

// option returns the server option that checks calls. It is a tap, which runs before the message of a call is
// read: so an unauthorized call costs almost nothing.
func (g *Gate) option() grpc.ServerOption { return grpc.InTapHandle(g.enter) }

func (g *Gate) enter(ctx context.Context, call *tap.Info) (_ context.Context, err error) {
	// a tap runs on gRPC's goroutine of the connection, which does not recover from panics
	defer Recovered(g.refused.logger, "the gate", &err)
	if check := g.CheckToken(call.Header.Get("authorization")); check == auth.TokenMissing ||
		check == auth.TokenWrong {
		g.refused.log("torchft: a call was refused", addressOf(ctx), check, "call", call.FullMethodName)
		return ctx, status.Error(codes.Unauthenticated, check.String())
	}
	if g.limits.IsJoin != nil && g.limits.IsJoin(call.FullMethodName) {
		if err := g.Join(ctx); err != nil {
			return ctx, err
		}
	}
	if p, ok := peer.FromContext(ctx); ok && !show(p.Addr, member) {
		return ctx, status.Error(codes.Unavailable, "too many connections are open (max_connections)")
	}
	return ctx, nil
}

// Join counts a call of ctx as one that joins a job. It returns an error if its address has made MaxJoins of
// them in this second.
func (g *Gate) Join(ctx context.Context) error {
	address := auth.HostOf(addressOf(ctx))
	if g.limits.MaxJoins <= 0 || g.joins.allow(address, time.Now()) {
		return nil
	}
	g.refused.log("torchft: a call was refused", address, "too many joins")
	// Not RESOURCE_EXHAUSTED: clients retry UNAVAILABLE after a moment.
	return status.Errorf(codes.Unavailable, "too many joins: %d in one second from %s (max_joins_per_second)",
		g.limits.MaxJoins, address)
}

func addressOf(ctx context.Context) string {
	if p, ok := peer.FromContext(ctx); ok {
		return p.Addr.String()
	}
	return "unknown"
}

// rate counts the joins of each address in the current second.
type rate struct {
	most int

	mu     sync.Mutex
	second int64
	seen   map[string]int // joins by address, in this second
}

func (r *rate) allow(address string, now time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if second := now.Unix(); second != r.second {
		r.second, r.seen = second, map[string]int{}
	}
	r.seen[address]++
	return r.seen[address] <= r.most
}
