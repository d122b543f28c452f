// Package auth decides which requests the servers of a job accept: it checks tokens, reads the files with
// tokens and certificates, and decides which requests may end a process.
package auth

import (
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"strings"
)

// Tokens are the secrets of a job, one per line of its token file. A process sends the first one, and accepts
// each of them. So a token can be replaced while the job runs: add the new one as the last line on all hosts,
// move it to the top on all hosts, and then remove the old one.
type Tokens []string

// ParseTokens reads the content of a token file.
func ParseTokens(content []byte) (Tokens, error) {
	var tokens Tokens
	for line := range strings.Lines(string(content)) {
		line = strings.Trim(line, " \t\r\n")
		if line == "" {
			continue
		}
		if strings.ContainsFunc(line, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return nil, errors.New("allowed are lines of printable ASCII without spaces")
		}
		tokens = append(tokens, line)
	}
	if len(tokens) == 0 {
		return nil, errors.New("it is empty: it must hold a token, such as `openssl rand -hex 32` makes one")
	}
	return tokens, nil
}

// Bearer returns the value of the authorization header, or of gRPC's metadata, for a token.
func Bearer(token string) string { return "Bearer " + token }

// TokenCheck is the result of checking the token of a request.
type TokenCheck int

const (
	TokenOK      TokenCheck = iota
	TokenNone               // this server has no tokens, and requires none
	TokenMissing            // the request has none
	TokenWrong
)

// Check checks the authorization of a request. It takes the same time for every wrong token.
func (t Tokens) Check(authorization []string) TokenCheck {
	if len(t) == 0 {
		return TokenNone
	}
	if len(authorization) == 0 {
		return TokenMissing
	}
	given, ok := strings.CutPrefix(authorization[0], "Bearer ")
	// ConstantTimeCompare returns early if lengths differ; digests have one length
	digest := sha256.Sum256([]byte(given))
	found := 0
	for _, token := range t {
		want := sha256.Sum256([]byte(token))
		found |= subtle.ConstantTimeCompare(digest[:], want[:])
	}
	if !ok || found != 1 {
		return TokenWrong
	}
	return TokenOK
}

// String returns the reason why a request is refused, and the remedy.
func (c TokenCheck) String() string {
	switch c {
	case TokenMissing:
		return "this server wants the job's token: set TORCHFT_TOKEN_FILE to the same file content, or " +
			"send `authorization: Bearer TOKEN`"
	case TokenWrong:
		return "the token is not the job's: TORCHFT_TOKEN_FILE of both sides must hold the same"
	default:
		return "allowed"
	}
}
