# The steps of a package's life, shared by deb and rpm. They also work in an image, where systemd does not run.

runs_systemd() { [ -d /run/systemd/system ]; }

installed() {
    systemd-sysusers probingd.conf
    runs_systemd || return 0
    systemd-tmpfiles --create probingd.conf
    systemctl daemon-reload
    # A restart keeps the pinned probes: the next collector reads what they saw meanwhile.
    if systemctl --quiet is-active probingd.service; then systemctl restart probingd.service; fi
    systemctl --quiet try-restart probing-web.service
}

removing() {
    runs_systemd || return 0
    systemctl --quiet disable --now probingd.service probing-web.service || true
    # Removes the probes, which hold on to libraries of jobs.
    systemctl stop probingd.target probingd-pins.service probingd.slice || true
}

removed() {
    rm -rf /run/probingd
    rmdir /sys/fs/bpf/probingd/default /sys/fs/bpf/probingd 2>/dev/null || true
    if runs_systemd; then systemctl daemon-reload; fi
}

purged() { rm -rf /var/lib/probingd /etc/probingd; }
