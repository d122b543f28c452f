package auth

import (
	"context"
	"net"
	"testing"

	"github.com/stretchr/testify/assert"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
)

// A proxy on this host forwards requests of other hosts. By the socket's address alone, these would seem to
// come from this host.
func TestAProxyOnThisHostMayNotEndAProcess(t *testing.T) {
	here := peer.NewContext(context.Background(),
		&peer.Peer{Addr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1}})
	assert.NoError(t, CheckEnding(here, false))
	for _, header := range []string{"forwarded", "x-forwarded-for", "x-real-ip", "via"} {
		through := metadata.NewIncomingContext(here, metadata.Pairs(header, "192.0.2.1"))
		assert.ErrorContains(t, CheckEnding(through, false), "token", header)
		assert.NoError(t, CheckEnding(through, true), "the request has the token")
	}
}
