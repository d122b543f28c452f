package rpc_test

import (
	"context"
	"errors"
	"net"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/torchft/torchft/go/internal/rpc"
)

// hosts is a network with one name, and the result of dialing each of its addresses.
type hosts map[string]error

func (hosts) Listen(string) (net.Listener, error) { return nil, errors.ErrUnsupported }

func (h hosts) Dial(_ context.Context, address string) (net.Conn, error) {
	if address == "name:1" { // like a dialer that tries all addresses: it returns the first error
		address = "a:1"
	}
	if err := h[address]; err != nil {
		return nil, err
	}
	conn, _ := net.Pipe()
	return conn, nil
}

func (h hosts) Resolve(context.Context, string) (addresses []string, err error) {
	for address, err := range h {
		if address == "" {
			return nil, err
		}
		addresses = append(addresses, address)
	}
	return addresses, nil
}

// A process has certainly ended only if every address of its host's name refuses the connection.
func TestAProcessHasEndedIfAllAddressesRefuse(t *testing.T) {
	refused, away := &net.OpError{Err: syscall.ECONNREFUSED}, context.DeadlineExceeded
	for name, test := range map[string]struct {
		hosts hosts
		want  bool
	}{
		"one address":                  {hosts{"a:1": refused}, true},
		"all of several":               {hosts{"a:1": refused, "b:1": refused, "c:1": refused}, true},
		"one does not answer":          {hosts{"a:1": refused, "b:1": away}, false},
		"one is another host, and up":  {hosts{"a:1": refused, "b:1": nil}, false},
		"it listens":                   {hosts{"a:1": nil}, false},
		"nothing answers":              {hosts{"a:1": away}, false},
		"the name has no address":      {hosts{}, false},
		"the name cannot be looked up": {hosts{"": errors.New("no such host")}, false},
	} {
		t.Run(name, func(t *testing.T) {
			assert.Equal(t, test.want, rpc.Refuses(t.Context(), test.hosts, "name:1"))
		})
	}
}

func TestAnEndedListenerRefusesAtAllAddressesOfLocalhost(t *testing.T) {
	lis, err := rpc.TCP.Listen("127.0.0.1:0")
	assert.NoError(t, err)
	address := lis.Addr().String()
	assert.False(t, rpc.Refuses(t.Context(), rpc.TCP, address))
	assert.NoError(t, lis.Close())
	assert.True(t, rpc.Refuses(t.Context(), rpc.TCP, address))
	_, port, _ := net.SplitHostPort(address)
	assert.True(t, rpc.Refuses(t.Context(), rpc.TCP, "localhost:"+port))
}
