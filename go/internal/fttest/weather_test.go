package fttest

import (
	"context"
	"io"
	"net"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// connect returns both ends of a new connection between two machines.
func connect(t *testing.T, n *Network, from, to string) (client, server net.Conn) {
	t.Helper()
	l, err := n.Host(to).Listen(to + ":0")
	require.NoError(t, err)
	client, err = n.Host(from).Dial(t.Context(), l.Addr().String())
	require.NoError(t, err)
	server, err = l.Accept()
	require.NoError(t, err)
	return client, server
}

// receive returns the bytes that arrive, and when.
func receive(t *testing.T, c net.Conn) (text string, after time.Duration, err error) {
	t.Helper()
	start := time.Now()
	buffer := make([]byte, 100)
	n, err := c.Read(buffer)
	return string(buffer[:n]), time.Since(start), err
}

func send(t *testing.T, c net.Conn, text string) {
	t.Helper()
	_, err := io.WriteString(c, text)
	require.NoError(t, err)
}

func TestACutHoldsOneDirectionUntilItIsHealed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := NewNetwork()
		client, server := connect(t, n, "a.1", "b.1")
		n.Sever("a", "b")
		send(t, client, "late")
		require.NoError(t, client.Close())
		time.AfterFunc(time.Second, func() { n.Heal("a", "b") })
		text, after, err := receive(t, server)
		require.NoError(t, err)
		assert.Equal(t, "late", text)
		assert.Equal(t, time.Second, after)
		_, _, err = receive(t, server)
		assert.Equal(t, io.EOF, err)

		client, server = connect(t, n, "a.1", "b.1")
		n.Sever("a", "b")
		send(t, server, "the other way")
		text, after, err = receive(t, client)
		require.NoError(t, err)
		assert.Equal(t, "the other way", text)
		assert.Zero(t, after)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = n.Host("a.2").Dial(ctx, server.LocalAddr().String())
		require.ErrorIs(t, err, context.DeadlineExceeded)
		n.Heal("a", "b")
		_, err = n.Host("a.2").Dial(t.Context(), server.LocalAddr().String())
		require.NoError(t, err)
	})
}

func TestAPausedMachineTakesConnectionsAndReadsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := NewNetwork()
		n.Pause("b")
		client, server := connect(t, n, "a.1", "b.1")
		send(t, client, "hello")
		time.AfterFunc(time.Second, func() { n.Resume("b") })
		text, after, err := receive(t, server)
		require.NoError(t, err)
		assert.Equal(t, "hello", text)
		assert.Equal(t, time.Second, after)
	})
}

func TestAHostThatVanishedSendsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := NewNetwork()
		client, server := connect(t, n, "a.1", "b.1")
		n.Host("b.1").Vanish()
		send(t, client, "into the void")
		require.NoError(t, client.SetReadDeadline(time.Now().Add(time.Minute)))
		_, after, err := receive(t, client)
		require.Error(t, err)
		assert.Equal(t, time.Minute, after)
		_, err = server.Write([]byte("x"))
		require.Error(t, err)

		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = n.Host("a.1").Dial(ctx, server.LocalAddr().String())
		require.ErrorIs(t, err, context.DeadlineExceeded)
		n.Host("b.1").Refuse()
		require.NoError(t, client.SetReadDeadline(time.Time{}))
		send(t, client, "who is there?")
		_, after, err = receive(t, client)
		require.Equal(t, io.EOF, err)
		assert.Zero(t, after)
		_, err = n.Host("a.1").Dial(t.Context(), server.LocalAddr().String())
		require.ErrorIs(t, err, syscall.ECONNREFUSED)
	})
}

func TestWrittenBytesArriveLaterAndInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := NewNetwork()
		next := 10 * time.Millisecond
		n.Delays(func(from, _ string) time.Duration {
			if from == "a.1" {
				return next
			}
			return 0
		})
		client, server := connect(t, n, "a.1", "b.1")
		send(t, client, "x")
		next = time.Millisecond
		send(t, client, "y")
		for _, want := range []string{"x", "y"} {
			text, _, err := receive(t, server)
			require.NoError(t, err)
			assert.Equal(t, want, text)
		}
	})
}
