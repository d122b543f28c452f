package auth

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// Ending is a request that would end a process: a kill, a drain, an eject.
type Ending struct {
	Token       TokenCheck
	Loopback    bool // it comes from this host, and through no proxy
	AllowRemote bool // the operator lets everybody do it
}

// Refusal is why a request must not be served; empty if it may.
func (e Ending) Refusal() string {
	switch e.Token {
	case TokenOK:
		return ""
	case TokenMissing, TokenWrong:
		return e.Token.String()
	case TokenNone:
	}
	if e.Loopback || e.AllowRemote {
		return ""
	}
	return "it comes from another host, and this server has no token by which to know who may: start the whole job with " +
		"a token_file (TORCHFT_TOKEN_FILE), or ask on this host"
}

// CheckEnding refuses a call that must not end a process. The token was looked at before the call began.
func CheckEnding(ctx context.Context, hasTokens bool) error {
	e := Ending{Token: TokenNone}
	if hasTokens {
		e.Token = TokenOK
	}
	if p, ok := peer.FromContext(ctx); ok {
		headers, _ := metadata.FromIncomingContext(ctx)
		e.Loopback = IsLoopback(p.Addr.String()) && !Forwarded(headers.Get)
	}
	if why := e.Refusal(); why != "" {
		return status.Error(codes.PermissionDenied, "kill is refused: "+why)
	}
	return nil
}

// Forwarded reports whether a proxy on this host hands on what comes from elsewhere, by the headers of a request.
func Forwarded(values func(header string) []string) bool {
	return slices.ContainsFunc([]string{"Forwarded", "X-Forwarded-For", "X-Real-Ip", "Via"}, func(header string) bool {
		return strings.Join(values(header), "") != ""
	})
}

// IsLoopback reports whether host:port, or a host, is this one by a loopback address.
func IsLoopback(address string) bool {
	ip, err := netip.ParseAddr(HostOf(address))
	return err == nil && ip.Unmap().IsLoopback()
}

// IsOwnHost reports whether the Host header of a request names this server in a way that no stranger's name server can
// point here: an address, localhost, or a name that the server has itself. A page of evil.example whose name was
// rebound to this host's address says "evil.example".
func IsOwnHost(header string, names ...string) bool {
	host := strings.ToLower(strings.TrimSuffix(HostOf(header), "."))
	if _, err := netip.ParseAddr(host); err == nil {
		return true
	}
	if host == "localhost" {
		return true
	}
	for _, name := range names {
		if name != "" && host == strings.ToLower(name) {
			return true
		}
	}
	return false
}

// HostOf is the host of host:port, or of a host alone.
func HostOf(address string) string {
	if host, _, err := net.SplitHostPort(address); err == nil {
		return host
	}
	return strings.Trim(address, "[]")
}
