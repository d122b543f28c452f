package dashboard

import (
	"embed"
	"encoding/json"
	"fmt"
	"io/fs"
	"net/http"
	"strconv"
)

//go:embed web openapi.json
var files embed.FS

// page serves all files of the web page. The page loads nothing from other hosts.
func page() http.Handler {
	web, err := fs.Sub(files, "web")
	if err != nil {
		panic(err) // impossible: the files are embedded
	}
	served := http.FileServerFS(web)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Cache-Control", "no-cache")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; "+
			"connect-src 'self'; img-src data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'")
		served.ServeHTTP(w, r)
	})
}

// Register adds the page and the routes below /api/v1/ that only read.
func (f *Feed) Register(mux *http.ServeMux) {
	for _, path := range []string{"/{$}", "/app.js", "/style.css"} {
		mux.Handle("GET "+path, page())
	}
	mux.HandleFunc("GET /api/v1/status", func(w http.ResponseWriter, _ *http.Request) {
		Answer(w, f.status())
	})
	mux.HandleFunc("GET /api/v1/events", f.serveEvents)
	mux.HandleFunc("GET /api/v1/history", func(w http.ResponseWriter, r *http.Request) {
		after, err := number(r, "after")
		if err != nil {
			Refuse(w, http.StatusBadRequest, err)
			return
		}
		Answer(w, f.snapshot(after))
	})
	mux.HandleFunc("GET /api/v1/openapi.json", func(w http.ResponseWriter, r *http.Request) {
		http.ServeFileFS(w, r, files, "openapi.json")
	})
	mux.HandleFunc("/api/v1/", func(w http.ResponseWriter, r *http.Request) {
		Refuse(w, http.StatusNotFound, fmt.Errorf("there is no %s %s; GET /api/v1/openapi.json lists the "+
			"routes", r.Method, r.URL.Path))
	})
}

// Answer sends JSON.
func Answer(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_ = json.NewEncoder(w).Encode(value) // fails only if the client has disconnected
}

// Refuse answers with the reason, as JSON.
func Refuse(w http.ResponseWriter, code int, err error) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(map[string]string{"error": err.Error()})
}

// number returns the value of a parameter, which must be a whole number of at least 0; 0 if it is absent.
func number(r *http.Request, name string) (int64, error) {
	text := r.URL.Query().Get(name)
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("%s=%q is not allowed; allowed: a whole number of at least 0", name, text)
	}
	return n, nil
}
