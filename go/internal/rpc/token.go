package rpc

import (
	"crypto/subtle"
	"strings"
)

// KillTokenEnv is the environment variable with the token that allows kill.
const KillTokenEnv = "TORCHFT_KILL_TOKEN"

// Bearer is the value of the authorization header, or of gRPC's metadata, that carries a token.
func Bearer(token string) string { return "Bearer " + token }

// TokenCheck is what a request for kill gets to hear.
type TokenCheck int

const (
	TokenOK TokenCheck = iota
	TokenDisabled
	TokenMissing
	TokenWrong
)

// CheckToken compares the authorization of a request with the token that the server was given.
func CheckToken(configured string, authorization []string) TokenCheck {
	if configured == "" {
		return TokenDisabled
	}
	if len(authorization) == 0 {
		return TokenMissing
	}
	given, ok := strings.CutPrefix(authorization[0], "Bearer ")
	if !ok || subtle.ConstantTimeCompare([]byte(given), []byte(configured)) != 1 {
		return TokenWrong
	}
	return TokenOK
}

// String says why a request was refused, and what to do about it.
func (c TokenCheck) String() string {
	switch c {
	case TokenOK:
		return "allowed"
	case TokenDisabled:
		return "kill is disabled: anyone who can connect could stop the job; to enable it set " + KillTokenEnv +
			" to the same secret for the lighthouse (or --kill_token) and for every manager"
	case TokenMissing:
		return "kill needs a token: send it as `authorization: Bearer TOKEN`"
	default:
		return "the token for kill is wrong"
	}
}
