package rpc

import (
	"bytes"
	"io"
	"net"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/require"
)

// oneSided is a connection that can only be read from.
type oneSided struct {
	net.Conn
	io.Reader
}

func (c oneSided) Read(p []byte) (int, error) { return c.Reader.Read(p) }

// FuzzPreface checks that the server that gets a connection reads all of its bytes, whatever they are and in
// whatever pieces they come.
func FuzzPreface(f *testing.F) {
	for _, start := range []string{"", "P", preface, preface + "\r\n\r\nSM\r\n\r\n", "PRI * HTTP/1.1\r\n",
		"GET / HTTP/1.1\r\n\r\n", "\x16\x03\x01"} {
		f.Add([]byte(start))
	}
	f.Fuzz(func(t *testing.T, sent []byte) {
		for _, pieces := range []io.Reader{bytes.NewReader(sent), iotest.OneByteReader(bytes.NewReader(sent)),
			iotest.DataErrReader(bytes.NewReader(sent))} {
			conn := oneSided{Reader: pieces}
			start, isGRPC, err := readPreface(conn)
			if err != nil {
				require.ErrorIs(t, err, io.EOF)
				require.True(t, len(sent) < len(preface) && bytes.HasPrefix([]byte(preface), sent))
				continue
			}
			require.Equal(t, bytes.HasPrefix(sent, []byte(preface)), isGRPC)
			all, err := io.ReadAll(&prefixConn{Conn: conn, prefix: start})
			require.NoError(t, err)
			require.Equal(t, sent, append([]byte{}, all...))
		}
	})
}
