package fttest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// CA signs certificates for one test. File contains its own certificate, in PEM.
type CA struct {
	File string

	t    *testing.T
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewCA returns a new authority.
func NewCA(t *testing.T) *CA {
	ca := &CA{t: t, dir: t.TempDir(), key: newKey(t)}
	ca.File = filepath.Join(ca.dir, "ca.pem")
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "torchft test"},
		NotBefore: validFrom, NotAfter: validTo,
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, ca.key.Public(), ca.key)
	require.NoError(t, err)
	ca.cert, err = x509.ParseCertificate(der)
	require.NoError(t, err)
	write(t, ca.File, "CERTIFICATE", der)
	return ca
}

// Certificates are valid both now and in a bubble of testing/synctest, whose clock begins in 2000.
var (
	validFrom = time.Date(1999, 1, 1, 0, 0, 0, 0, time.UTC)
	validTo   = time.Date(2099, 1, 1, 0, 0, 0, 0, time.UTC)
)

// Issue issues a certificate, for a server and a client on these hosts, and its key.
func (ca *CA) Issue(hosts ...string) (certFile, keyFile string) { return ca.issue(validTo, hosts) }

// IssueExpired is Issue for a certificate that has expired.
func (ca *CA) IssueExpired(hosts ...string) (certFile, keyFile string) {
	return ca.issue(validFrom.Add(time.Hour), hosts)
}

func (ca *CA) issue(until time.Time, hosts []string) (certFile, keyFile string) {
	key := newKey(ca.t)
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	require.NoError(ca.t, err)
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "torchft test"},
		NotBefore: validFrom, NotAfter: until,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, host := range hosts {
		if ip := net.ParseIP(host); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca.cert, key.Public(), ca.key)
	require.NoError(ca.t, err)
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(ca.t, err)
	name := filepath.Join(ca.dir, serial.String())
	write(ca.t, name+".pem", "CERTIFICATE", der)
	write(ca.t, name+".key", "PRIVATE KEY", keyDER)
	return name + ".pem", name + ".key"
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	return key
}

func write(t *testing.T, path, kind string, der []byte) {
	require.NoError(t, os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
}

// File creates a file that only its owner can read.
func File(t testing.TB, content string) string {
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, []byte(content), 0o600))
	return path
}

// Trusting returns the configuration of a client that trusts an authority.
func Trusting(t *testing.T, caFile string) *tls.Config {
	content, err := os.ReadFile(caFile)
	require.NoError(t, err)
	pool := x509.NewCertPool()
	require.True(t, pool.AppendCertsFromPEM(content))
	return &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}
}
