package fttest

import (
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Quiet returns a logger that discards everything.
var Quiet = slog.New(slog.DiscardHandler)

// SendGarbage sends to http://host:port, over real sockets, data like that of a port scanner or a broken
// client, and closes the connection.
func SendGarbage(t testing.TB, address string) {
	t.Helper()
	for _, text := range []string{
		"",
		"\x00\xff\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", // the start of TLS
		"P",
		"PRI * HTTP/2.0",
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + strings.Repeat("\xff", 4096),
		"PRI * HTTP/1.1\r\n\r\n",
		"GET / HTTP/9.9\r\n\r\n",
		"POST /replica/ HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
		strings.Repeat("A", 200_000) + "\r\n\r\n",
	} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(address, "http://"))
		require.NoError(t, err)
		require.NoError(t, conn.SetDeadline(time.Now().Add(time.Second)))
		// The server may close the connection first, so errors of writing are expected.
		_, _ = io.WriteString(conn, text)
		_ = conn.(*net.TCPConn).CloseWrite()
		_, _ = io.Copy(io.Discard, conn)
		require.NoError(t, conn.Close())
	}
}
