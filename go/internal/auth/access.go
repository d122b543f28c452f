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

// Ending describes a request that ends a process: a kill or a drain.
type Ending struct {
	Token       TokenCheck
	Loopback    bool // the request comes from this host, and not through a proxy
	AllowRemote bool // the operator allows it from all hosts, without a token
}

// Refusal returns the reason why the request is refused; empty if it is accepted.
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
	return "it comes from another host, and this server has no token to check its permission: start the " +
		"whole job with " +
		"a token_file (TORCHFT_TOKEN_FILE), or send the request from this host"
}

// CheckEnding refuses a call that must not end a process. With hasTokens, the call has a valid token:
// rpc.Gate refuses all others.
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

// Forwarded reports whether a request came through a proxy, by its headers: perhaps from another host.
func Forwarded(values func(header string) []string) bool {
	return slices.ContainsFunc([]string{"Forwarded", "X-Forwarded-For", "X-Real-Ip", "Via"},
		func(header string) bool {
			return strings.Join(values(header), "") != ""
		})
}

// IsLoopback reports whether host:port, or a host alone, is a loopback address.
func IsLoopback(address string) bool {
	ip, err := netip.ParseAddr(HostOf(address))
	return err == nil && ip.Unmap().IsLoopback()
}

// IsOwnHost reports whether the Host header of a request names this server by an address, localhost, or one
// of its own names. It prevents DNS rebinding: a page of evil.example, whose name was pointed to this host's
// address, sends "evil.example".
func IsOwnHost(header string, names ...string) bool {
	host := strings.ToLower(strings.TrimSuffix(HostOf(header), "."))
	_, err := netip.ParseAddr(host)
	return err == nil || host == "localhost" || host != "" &&
		slices.ContainsFunc(names, func(name string) bool { return host == strings.ToLower(name) })
}

// HostOf returns the host of host:port, or of a host alone.
func HostOf(address string) string {
	if host, _, err := net.SplitHostPort(address); err == nil {
		return host
	}
	return strings.Trim(address, "[]")
}
