package auth_test

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/torchft/torchft/go/internal/auth"
	"github.com/torchft/torchft/go/internal/fttest"
	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/internal/testmain"
)

func TestMain(m *testing.M) { testmain.NoGoroutineIsLeft(m) }

func TestFilesThatCannotBeUsed(t *testing.T) {
	ca := fttest.NewCA(t)
	cert, key := ca.Issue("a")
	_, otherKey := ca.Issue("b")
	empty, junk := fttest.File(t, " \n\n"), fttest.File(t, "no pem")
	missing := filepath.Join(t.TempDir(), "missing")
	for wantError, security := range map[string]auth.Security{
		`token_file (TORCHFT_TOKEN_FILE) is "` + missing +
			`": it cannot be read`: {TokenFile: missing},
		`token_file (TORCHFT_TOKEN_FILE) is "` + empty +
			`": it is empty: it must hold a token`: {TokenFile: empty},
		`token_file (TORCHFT_TOKEN_FILE) is "` + junk +
			`": allowed are lines of printable ASCII`: {TokenFile: junk},
		`token_file (TORCHFT_TOKEN_FILE) is "/dev/zero": it must be a regular file`: {TokenFile: "/dev/zero"},
		`tls_key (TORCHFT_TLS_KEY) is "": tls_cert is`:                              {TLSCert: cert},
		`tls_cert (TORCHFT_TLS_CERT) is "": tls_key is`:                             {TLSKey: key},
		`tls_cert (TORCHFT_TLS_CERT) is "": tls_client_ca is`:                       {TLSClientCA: ca.File},
		`tls_cert (TORCHFT_TLS_CERT) is "` + missing +
			`": it cannot be read`: {TLSCert: missing, TLSKey: key},
		`tls_key (TORCHFT_TLS_KEY) is "` + missing +
			`": it cannot be read`: {TLSCert: cert, TLSKey: missing},
		`tls_cert (TORCHFT_TLS_CERT) is "` + cert +
			`": it must be a certificate in PEM, and tls_key`: {TLSCert: cert, TLSKey: otherKey},
		`tls_client_ca (TORCHFT_TLS_CLIENT_CA) is "` + junk +
			`": it must hold at least one certificate`: {TLSCert: cert, TLSKey: key, TLSClientCA: junk},
		`tls_ca (TORCHFT_TLS_CA) is "` + junk +
			`": it must hold at least one certificate`: {TLSCA: junk},
	} {
		assert.ErrorContains(t, security.Validate(), wantError)
		_, err := rpc.NewGate(security, rpc.Limits{}, fttest.Quiet)
		assert.ErrorContains(t, err, wantError)
		_, err = rpc.Dial(t.Context(), rpc.Dialing{Security: security}, "lighthouse", "http://127.0.0.1:1",
			time.Second)
		assert.Equal(t, codes.InvalidArgument, status.Code(err))
	}
}

func TestAReadableSecretIsWarnedAboutOnce(t *testing.T) {
	token := fttest.File(t, "secret")
	require.NoError(t, os.Chmod(token, 0o644))
	log := &fttest.Log{}
	for range 2 {
		_, err := rpc.NewGate(auth.Security{TokenFile: token}, rpc.Limits{},
			slog.New(slog.NewTextHandler(log, nil)))
		require.NoError(t, err)
	}
	assert.Equal(t, 1, log.Count("chmod 600"))
}

func TestTokens(t *testing.T) {
	parsed, err := auth.ParseTokens([]byte("\r\n first \nsecond\r\n\n"))
	require.NoError(t, err)
	require.Equal(t, auth.Tokens{"first", "second"}, parsed)
	for _, content := range []string{"", "\n \n", "two words", "sécret", "a\x00b"} {
		_, err := auth.ParseTokens([]byte(content))
		assert.Error(t, err, "%q", content)
	}
	for _, tc := range []struct {
		tokens auth.Tokens
		sent   []string
		want   auth.TokenCheck
	}{
		{nil, nil, auth.TokenNone},
		{nil, []string{"Bearer x"}, auth.TokenNone},
		{auth.Tokens{"x"}, nil, auth.TokenMissing},
		{auth.Tokens{"x"}, []string{"x"}, auth.TokenWrong},
		{auth.Tokens{"x"}, []string{"Bearer y"}, auth.TokenWrong},
		{auth.Tokens{"x"}, []string{"Bearer "}, auth.TokenWrong},
		{auth.Tokens{"x"}, []string{"Bearer xx"}, auth.TokenWrong},
		{auth.Tokens{"x"}, []string{"Bearer y", "Bearer x"}, auth.TokenWrong},
		{auth.Tokens{"x", "y"}, []string{auth.Bearer("x")}, auth.TokenOK},
		{auth.Tokens{"x", "y"}, []string{auth.Bearer("y")}, auth.TokenOK},
	} {
		assert.Equal(t, tc.want, tc.tokens.Check(tc.sent), "%v", tc)
	}
}

func TestWhichRequestsMayEndAProcess(t *testing.T) {
	for _, tc := range []struct {
		ending  auth.Ending
		refused string
	}{
		{auth.Ending{Token: auth.TokenNone}, "another host"},
		{auth.Ending{Token: auth.TokenNone, Loopback: true}, ""},
		{auth.Ending{Token: auth.TokenNone, AllowRemote: true}, ""},
		{auth.Ending{Token: auth.TokenMissing, Loopback: true, AllowRemote: true}, "wants the job's token"},
		{auth.Ending{Token: auth.TokenWrong, Loopback: true, AllowRemote: true}, "not the job's"},
		{auth.Ending{Token: auth.TokenOK}, ""},
	} {
		if tc.refused == "" {
			assert.Empty(t, tc.ending.Refusal(), "%+v", tc.ending)
		} else {
			assert.Contains(t, tc.ending.Refusal(), tc.refused, "%+v", tc.ending)
		}
	}
	for address, want := range map[string]bool{
		"127.0.0.1:1": true, "[::1]:1": true, "127.8.8.8": true, "[::ffff:127.0.0.1]:1": true,
		"10.0.0.1:1": false, "localhost:1": false, "": false, "127.0.0.1.example:1": false,
	} {
		assert.Equal(t, want, auth.IsLoopback(address), address)
	}
	for header, want := range map[string]bool{
		"127.0.0.1:29510": true, "[::1]:1": true, "[fe80::1]": true, "10.1.2.3": true, "localhost:1": true,
		"LOCALHOST": true, "localhost.": true,
		"lighthouse:1": true, "Lighthouse": true, "evil.example:29510": false,
		"lighthouse.evil.example": false, "": false, "10.1.2.3.example": false,
	} {
		assert.Equal(t, want, auth.IsOwnHost(header, "lighthouse", ""), header)
	}
}
