package rpc

import (
	"errors"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// A forked child has copies of all descriptors; here a duplicated descriptor replaces the child.
func TestSocketsEndAlthoughAForkedChildHoldsThem(t *testing.T) {
	lis, err := TCP.Listen("127.0.0.1:0")
	require.NoError(t, err)
	addr := lis.Addr().String()
	inherited, err := lis.(tcpListener).File()
	require.NoError(t, err)
	defer func() { require.NoError(t, inherited.Close()) }()

	conn, err := TCP.Dial(t.Context(), addr)
	require.NoError(t, err)
	inheritedConn, err := conn.(tcpConn).File()
	require.NoError(t, err)
	defer func() { require.NoError(t, inheritedConn.Close()) }()
	there, err := lis.Accept()
	require.NoError(t, err)
	defer func() { require.NoError(t, there.Close()) }()

	require.NoError(t, conn.Close())
	require.NoError(t, there.SetReadDeadline(time.Now().Add(5*time.Second)))
	_, err = there.Read(make([]byte, 1))
	assert.EqualError(t, err, "EOF")

	require.NoError(t, lis.Close())
	again, err := TCP.Listen(addr)
	require.NoError(t, err, "the port is free")
	require.NoError(t, again.Close())
}

func TestNoIPv6(t *testing.T) {
	assert.True(t, noIPv6(&net.OpError{Op: "listen", Err: syscall.EAFNOSUPPORT}))
	assert.True(t, noIPv6(&net.OpError{Op: "listen", Err: syscall.EADDRNOTAVAIL}))
	assert.False(t, noIPv6(&net.OpError{Op: "listen", Err: syscall.EADDRINUSE}))
	assert.False(t, noIPv6(errors.New("other")))
}
