package auth

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"os"
	"slices"
)

// Security names the files that protect a job's connections. While the name of a file is empty, its
// protection is off.
type Security struct {
	// TokenFile contains the job's tokens, one per line (Tokens). A server with this file refuses calls that
	// contain none of its tokens.
	TokenFile string `json:"token_file"`
	// TLSCert and TLSKey are the certificate and the key of this process, in PEM. With them a server uses
	// TLS, and a client can present a certificate to a server that requires one.
	TLSCert string `json:"tls_cert"`
	TLSKey  string `json:"tls_key"`
	// TLSCA contains the authorities whose server certificates are trusted, in PEM; empty means the system's.
	// If it is set, a client refuses addresses that begin with http://, since a plain connection proves
	// nothing about the server.
	TLSCA string `json:"tls_ca"`
	// TLSClientCA contains the authorities of client certificates, in PEM. A server with this file refuses
	// clients that present no certificate of one of them.
	TLSClientCA string `json:"tls_client_ca"`
}

// The environment variables of a Security's files.
const (
	TokenFileEnv   = "TORCHFT_TOKEN_FILE"
	TLSCertEnv     = "TORCHFT_TLS_CERT"
	TLSKeyEnv      = "TORCHFT_TLS_KEY"
	TLSCAEnv       = "TORCHFT_TLS_CA"
	TLSClientCAEnv = "TORCHFT_TLS_CLIENT_CA"
)

// SecurityFromEnv returns the files named in the environment.
func SecurityFromEnv() Security {
	return Security{
		TokenFile: os.Getenv(TokenFileEnv), TLSCert: os.Getenv(TLSCertEnv), TLSKey: os.Getenv(TLSKeyEnv),
		TLSCA: os.Getenv(TLSCAEnv), TLSClientCA: os.Getenv(TLSClientCAEnv),
	}
}

// bad returns an error that names a setting, its value, and what is allowed.
func bad(setting, env, path string, why any) error {
	return fmt.Errorf("%s (%s) is %q: %v", setting, env, path, why)
}

// Validate reads every file, and returns an error if one of them is invalid.
func (s Security) Validate() error {
	_, err := s.Open(slog.New(slog.DiscardHandler))
	return err
}

// ServesTLS reports whether a server with these settings is reached at https://.
func (s Security) ServesTLS() bool { return s.TLSCert != "" }

// HasTokens reports whether a server with these settings requires a token.
func (s Security) HasTokens() bool { return s.TokenFile != "" }

// Protection is a Security with its files read. A nil Tokens or Server means that this protection is off;
// Client is never nil.
type Protection struct {
	Tokens *Watched[Tokens]
	Server *Watched[*tls.Config]
	Client *Watched[*tls.Config]
}

// Open reads the files.
func (s Security) Open(log *slog.Logger) (p Protection, err error) {
	if err := s.validateNames(); err != nil {
		return p, err
	}
	if s.TokenFile != "" {
		checkPermissions(log, "token_file", s.TokenFile)
		if p.Tokens, err = watch(log, []string{s.TokenFile}, s.readTokens); err != nil {
			return p, err
		}
	}
	if s.TLSCert != "" {
		checkPermissions(log, "tls_key", s.TLSKey)
		if p.Server, err = watch(log, s.files(s.TLSCert, s.TLSKey, s.TLSClientCA), s.serverTLS); err != nil {
			return p, err
		}
	}
	p.Client, err = watch(log, s.files(s.TLSCA, s.TLSCert, s.TLSKey), s.clientTLS)
	return p, err
}

func (s Security) validateNames() error {
	switch {
	case s.TLSCert != "" && s.TLSKey == "":
		return bad("tls_key", TLSKeyEnv, "", fmt.Sprintf("tls_cert is %q and needs the file of its key",
			s.TLSCert))
	case s.TLSKey != "" && s.TLSCert == "":
		return bad("tls_cert", TLSCertEnv, "", fmt.Sprintf("tls_key is %q and needs the file of its "+
			"certificate", s.TLSKey))
	case s.TLSClientCA != "" && s.TLSCert == "":
		return bad("tls_cert", TLSCertEnv, "", fmt.Sprintf("tls_client_ca is %q, and a server that asks "+
			"for certificates needs one itself", s.TLSClientCA))
	}
	return nil
}

func (Security) files(paths ...string) []string {
	return slices.DeleteFunc(paths, func(path string) bool { return path == "" })
}

// maxSecret bounds the size of a file in bytes: a bundle of all public authorities has 250 KB.
const maxSecret = 4 << 20

func (s Security) readTokens() (Tokens, error) {
	content, err := readFile(s.TokenFile)
	if err == nil {
		var tokens Tokens
		if tokens, err = ParseTokens(content); err == nil {
			return tokens, nil
		}
	}
	return nil, bad("token_file", TokenFileEnv, s.TokenFile, err)
}

func readFile(path string) ([]byte, error) {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return nil, fmt.Errorf("it cannot be read: %w", err)
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("it must be a regular file")
	case info.Size() > maxSecret:
		return nil, fmt.Errorf("it has %d bytes: allowed are %d", info.Size(), maxSecret)
	}
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("it cannot be read: %w", err)
	}
	return content, nil
}

// serverTLS returns the TLS settings of the port that serves gRPC and HTTP. HTTP/1.1 is the first of
// NextProtos, so a client that supports both protocols, such as a browser, uses HTTP/1.1: on this port,
// HTTP/2 is served only as gRPC.
func (s Security) serverTLS() (*tls.Config, error) {
	cert, err := s.certificate()
	if err != nil {
		return nil, err
	}
	config := &tls.Config{
		MinVersion:             tls.VersionTLS12,
		Certificates:           []tls.Certificate{cert},
		NextProtos:             []string{"http/1.1", "h2"},
		SessionTicketsDisabled: true, // a resumed session would present no certificate again
	}
	if s.TLSClientCA != "" {
		if config.ClientCAs, err = readCA("tls_client_ca", TLSClientCAEnv, s.TLSClientCA); err != nil {
			return nil, err
		}
		config.ClientAuth = tls.RequireAndVerifyClientCert
	}
	return config, nil
}

func (s Security) clientTLS() (*tls.Config, error) {
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if s.TLSCA != "" {
		var err error
		if config.RootCAs, err = readCA("tls_ca", TLSCAEnv, s.TLSCA); err != nil {
			return nil, err
		}
	}
	if s.TLSCert != "" {
		cert, err := s.certificate()
		if err != nil {
			return nil, err
		}
		// Without this function, Go would present the certificate only if the server names its authority.
		// With it, Go always presents the certificate: if the server refuses it, the server's alert contains
		// the reason, and not only that a certificate is required.
		config.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate,
			error) {
			return &cert, nil
		}
	}
	return config, nil
}

func (s Security) certificate() (tls.Certificate, error) {
	cert, err := readFile(s.TLSCert)
	if err != nil {
		return tls.Certificate{}, bad("tls_cert", TLSCertEnv, s.TLSCert, err)
	}
	key, err := readFile(s.TLSKey)
	if err != nil {
		return tls.Certificate{}, bad("tls_key", TLSKeyEnv, s.TLSKey, err)
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return tls.Certificate{}, bad("tls_cert", TLSCertEnv, s.TLSCert, fmt.Sprintf(
			"it must be a certificate in PEM, and tls_key (%s, %q) its key: %v", TLSKeyEnv, s.TLSKey, err))
	}
	return pair, nil
}

func readCA(setting, env, path string) (*x509.CertPool, error) {
	content, err := readFile(path)
	if err != nil {
		return nil, bad(setting, env, path, err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(content) {
		return nil, bad(setting, env, path, "it must hold at least one certificate in PEM")
	}
	return pool, nil
}

// Credentials add the first of a client's tokens to each call.
type Credentials struct{ Tokens *Watched[Tokens] }

// GetRequestMetadata returns the header with the token.
func (c Credentials) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": Bearer(c.Tokens.Get()[0])}, nil
}

// RequireTransportSecurity returns false, so that tokens can be sent without TLS in networks that encrypt all
// traffic themselves, which are common. If TLSCA is set, package rpc refuses plain connections in any case.
func (Credentials) RequireTransportSecurity() bool { return false }
